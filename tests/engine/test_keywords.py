"""Names of vLLM are accepted, and an unknown name gets the nearest right one."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from pyvelo import LLM, AsyncLLM, AsyncSession, BeamSearchParams, SamplingParams, Session
from pyvelo.config import EngineConfig
from pyvelo.errors import ArgumentError, ConfigError, VeloError
from pyvelo.other_names import EQUIVALENTS, WITHOUT

NOBODY = cast(Any, None)


def called(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    result = call(*arguments, **keywords)
    if inspect.iscoroutine(result):
        asyncio.run(result)


def test_the_tables_of_other_names() -> None:
    """A second name stands for a name that exists; and no name that exists is said to be missing."""
    calls = [
        LLM,
        LLM.generate,
        LLM.chat,
        LLM.tokenize,
        LLM.detokenize,
        LLM.embed,
        BeamSearchParams,
        SamplingParams,
    ]
    known = {name for call in calls for name in inspect.signature(call).parameters}
    assert set(EQUIVALENTS.values()) <= known
    assert not known & WITHOUT.keys()
    assert not EQUIVALENTS.keys() & WITHOUT.keys()


@pytest.mark.parametrize(
    ("call", "name", "message"),
    [
        (
            SamplingParams,
            "temprature",
            "SamplingParams has no argument 'temprature': did you mean temp",
        ),
        (SamplingParams, "repeat_penalty", "did you mean repetition_penalty?"),
        (SamplingParams, "zzz", "SamplingParams has no argument 'zzz': there are max_tokens, "),
        (BeamSearchParams, "width", "did you mean beam_width?"),
        (LLM, "lora_path", "did you mean lora?"),
        (LLM, "ctx", "LLM has no argument 'ctx': did you mean n_ctx?"),
        (LLM, "gpu_memory_utilization", "did you mean memory_utilization?"),
        (LLM, "kv_cache_dtype", "did you mean kv_type?"),
        (LLM, "temperature", "temperature belongs to SamplingParams, which generate takes"),
        (AsyncLLM, "top_kk", "top_k belongs to SamplingParams, which generate takes"),
        (SamplingParams, "response_format", "did you mean json_schema?"),
        (SamplingParams, "guided_choice", "did you mean regex?"),
        (LLM, "num_ctx", "did you mean n_ctx?"),
        (SamplingParams, "num_predict", "did you mean max_tokens?"),
        (LLM, "dtype", "LLM has no argument 'dtype': weights have the types of the file"),
        (LLM, "tensor_parallel_size", "see n_gpu_layers"),
        (AsyncLLM, "trust_remote_code", "leave it out: a GGUF file has no code"),
        (SamplingParams, "guided_decoding", "give json_schema=, regex= or grammar= instead"),
        (SamplingParams, "structured_outputs", "give json_schema=, regex= or grammar= instead"),
        (SamplingParams, "bad_words", "logit_bias={token: -100} bans a token"),
        (SamplingParams, "logits_processors", "functions on logits are not supported"),
        (LLM, "chat_template", "LLM has no argument 'chat_template': give it to each call: llm.chat("),
        (AsyncLLM, "chat_template", "llm.chat(messages, chat_template=...)"),
        (LLM, "pooling_type", "call embed with pooling='mean', 'cls' or 'last'"),
        (partial(LLM.generate, NOBODY), "use_tqdm", "leave it out: calls show no progress bar"),
        (partial(LLM.generate, NOBODY), "prompt_token_ids", "in place of the text of a prompt"),
        (partial(LLM.embed, NOBODY), "pooling_type", "call embed with pooling="),
        (SamplingParams, "typical_p", "this sampler does not exist here"),
        (AsyncLLM, "kv_types", "AsyncLLM has no argument 'kv_types': did you mean kv_type?"),
    ],
)
def test_the_nearest_right_name_of_a_setting(call: Callable[..., Any], name: str, message: str) -> None:
    arguments = [] if call in (SamplingParams, BeamSearchParams) else ["model.gguf"]
    with pytest.raises(ArgumentError) as refused:
        call(*arguments, **{name: 1})
    assert message in str(refused.value)
    assert isinstance(refused.value, TypeError)
    assert isinstance(refused.value, VeloError)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (LLM, "tokenizer_mode max_logprobs"),
        (SamplingParams, "detokenize output_kind min_words"),
        (partial(LLM.generate, NOBODY, "Hello"), "detokenize priority_class"),
    ],
)
def test_names_without_an_equivalent(call: Callable[..., Any], names: str) -> None:
    arguments = ["model.gguf"] if call is LLM else []
    for name in names.split():
        with pytest.raises(ArgumentError, match=f"has no argument '{name}': there are [a-z]"):
            call(*arguments, **{name: 1})


@pytest.mark.parametrize("face", [LLM, AsyncLLM])
def test_stream_is_a_method(face: Any) -> None:
    for method, wanted in (("generate", "stream"), ("chat", "chat_stream")):
        with pytest.raises(ArgumentError, match=f"has no argument 'stream': call {wanted} to get"):
            called(getattr(face, method), NOBODY, ["Hello"], stream=True)


@pytest.mark.parametrize("face", [LLM, AsyncLLM])
@pytest.mark.parametrize("method", ["generate", "stream", "chat", "chat_stream"])
def test_a_sampling_parameter_is_no_argument_of_a_call(face: Any, method: str) -> None:
    for name, wanted in (("temperature", "temperature"), ("top_pp", "top_p"), ("max_token", "max_tokens")):
        with pytest.raises(ArgumentError, match=rf"give params=SamplingParams\({wanted}=\.\.\.\)"):
            called(getattr(face, method), NOBODY, ["Hello"], **{name: 1})
    with pytest.raises(ArgumentError, match="did you mean sampling_params"):
        called(getattr(face, method), NOBODY, ["Hello"], sampling_param=1)


@pytest.mark.parametrize("face", [LLM, AsyncLLM])
def test_other_calls_name_the_nearest_too(face: Any) -> None:
    for method, name, wanted in (
        ("chat", "chat_template_kwarg", "chat_template_kwargs"),
        ("chat", "tool", "tools"),
        ("beam_search", "length_penalt", r"BeamSearchParams\(length_penalty=\.\.\.\)"),
        ("session", "salt", "cache_salt"),
        ("embed", "pool", "pooling"),
        ("tokenize", "add_bos", "add_special"),
        ("tokenize", "special", "did you mean parse_special"),
        ("detokenize", "specials", "special"),
        ("chat_prompt", "template", "chat_template"),
    ):
        with pytest.raises(ArgumentError, match=wanted):
            called(getattr(face, method), NOBODY, ["Hello"], **{name: 1})
    for session in (Session, AsyncSession):
        with pytest.raises(ArgumentError, match=r"SamplingParams\(seed=\.\.\.\)"):
            called(cast(Any, session).generate, NOBODY, seed=1)


def test_what_is_checked_keeps_its_signature_and_its_kind() -> None:
    assert list(inspect.signature(SamplingParams).parameters)[:2] == ["max_tokens", "min_tokens"]
    assert "sampling_params" in inspect.signature(LLM.generate).parameters
    assert inspect.iscoroutinefunction(AsyncLLM.generate)
    params = SamplingParams(top_k=3, stop="x", logit_bias={1: 2.0})
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == replace(params) == params


def test_names_of_vllm_for_the_engine() -> None:
    config = EngineConfig(model="m.gguf", max_model_len=300, max_num_batched_tokens=64)
    assert (config.n_ctx, config.max_batch_tokens) == (300, 64)
    assert EngineConfig(model="m.gguf", n_ctx=300, max_model_len=300).n_ctx == 300
    config = EngineConfig(model="m.gguf", max_num_batched_tokens=512)
    assert (config.n_ctx, config.max_batch_tokens) == (None, 512)
    with pytest.raises(ConfigError, match="n_ctx=200 and max_model_len=300 are one setting: give one"):
        EngineConfig(model="m.gguf", n_ctx=200, max_model_len=300)
    with pytest.raises(ConfigError, match="max_batch_tokens=64 and max_num_batched_tokens=32"):
        EngineConfig(model="m.gguf", max_batch_tokens=64, max_num_batched_tokens=32)
    for name in ("max_model_len", "max_num_batched_tokens"):
        for value in (0, "4", 1.5, True):
            with pytest.raises(ConfigError, match=f"{name}={value!r}: give an integer"):
                EngineConfig(model="m.gguf", **cast(Any, {name: value}))
