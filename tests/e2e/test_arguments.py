"""Every argument with values of every kind: it is accepted, or refused in one line by PyVelo."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyvelo import LLM, ArgumentError, AsyncLLM, BeamSearchParams, SamplingParams, VeloError
from pyvelo.chat.conversation import ChatOptions
from pyvelo.errors import ConfigError, RequestError

VALUES: list[Callable[[], Any]] = [
    *(lambda value=value: value for value in (True, False, None, 0, 3, -1, 1.5, 2**70, -(2**70), 3 + 1j)),
    *(lambda value=value: value for value in (float("nan"), float("inf"), "", "x", b"", b"x")),
    *(lambda value=value: value for value in ("\ud800", "a\0b", lambda *_: None)),
    *(lambda value=value: value for value in (np.int64(3), np.float32(0.5), np.bool_(True), np.array(3))),
    *(lambda value=value: value for value in (np.array([1, 2]), np.array([]), Path("x"), object(), int)),
    *(lambda value=value: value for value in ([], {}, (), [None], [[]], {1}, {1: 2}, range(2))),
    lambda: iter(()),
]  # fmt: skip
SETTINGS: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "max_num_seqs": 2, "max_batch_tokens": 64}
SHORT = SamplingParams(max_tokens=1, temperature=0)
BEAMS = BeamSearchParams(max_tokens=1, beam_width=2)
HELLO = [{"role": "user", "content": "a"}]


def attempt(call: Callable[[], Any]) -> str:
    """Return the error's text, "" if there is none."""
    try:
        call()
    except VeloError as error:
        text = str(error)
        assert text
        assert "\n" not in text
        assert len(text) < 600
        assert "object has no attribute" not in text
        return text
    return ""


@pytest.mark.parametrize("face", [LLM, AsyncLLM])
def test_constructor(face: Any, tiny_model: Path) -> None:
    for name in list(inspect.signature(face.__init__).parameters)[1:]:
        for make in VALUES:
            settings = {"model": tiny_model, **SETTINGS, name: make()}

            def opened(settings: dict[str, Any] = settings) -> None:
                llm = face(settings.pop("model"), **settings)
                if face is LLM:
                    llm.close()

            attempt(opened)


@pytest.mark.parametrize("kind", [SamplingParams, BeamSearchParams])
def test_parameters(kind: Any) -> None:
    for field in fields(kind):
        for make in VALUES:
            value = make()
            text = attempt(lambda name=field.name, value=value: kind(**{name: value}))
            assert not text or field.name in text or "logit_bias" in text


def calls(llm: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield each argument of each method, with a call that gives it a value."""
    session = llm.session("a")
    yield "prompts", lambda v: llm.generate(v, SHORT)
    yield "a prompt", lambda v: llm.generate([v], SHORT)
    yield "a token", lambda v: llm.generate([[v]], SHORT)
    yield "params", lambda v: llm.generate("a", v)
    yield "one of params", lambda v: llm.generate("a", [v])
    yield "sampling_params", lambda v: llm.generate("a", sampling_params=v)
    yield "request_id", lambda v: llm.generate("a", SHORT, request_id=v)
    yield "return_errors", lambda v: llm.generate("a", SHORT, return_errors=v)
    yield "prompt of a stream", lambda v: list(llm.stream(v, SHORT))
    yield "params of a stream", lambda v: list(llm.stream("a", v))
    yield "messages", lambda v: llm.chat(v, SHORT)
    yield "a message", lambda v: llm.chat([v], SHORT)
    yield "role", lambda v: llm.chat([{"role": v, "content": "a"}], SHORT)
    yield "content", lambda v: llm.chat([{"role": "user", "content": v}], SHORT)
    yield "another key", lambda v: llm.chat([{**HELLO[0], "x": v}], SHORT)
    yield "params of a chat", lambda v: llm.chat(HELLO, v) if v is not None else None
    yield "messages of a stream", lambda v: list(llm.chat_stream(v, SHORT))
    yield "messages of a prompt", lambda v: llm.chat_prompt(v)
    for name in ChatOptions.__annotations__:
        yield name, lambda v, name=name: llm.chat(HELLO, SHORT, **{name: v})
    yield "prompts of beams", lambda v: llm.beam_search(v, BEAMS)
    yield "params of beams", lambda v: llm.beam_search("a", v) if v is not None else None
    yield "prompt of a session", lambda v: llm.session(v).close()
    yield "cache_salt", lambda v: llm.session("a", cache_salt=v).close()
    yield "append", session.append
    yield "params of a session", lambda v: session.generate(v) if v is not None else None
    yield "id of a session", lambda v: session.generate(SHORT, request_id=v)
    yield "params of its stream", lambda v: list(session.stream(v)) if v is not None else None
    yield "texts", lambda v: llm.embed(v, pooling="mean")
    yield "a text", lambda v: llm.embed([v], pooling="mean")
    yield "pooling", lambda v: llm.embed("a", pooling=v)
    yield "normalize", lambda v: llm.embed("a", pooling="mean", normalize=v)
    yield "text to tokenize", llm.tokenize
    yield "add_special", lambda v: llm.tokenize("a", add_special=v)
    yield "parse_special", lambda v: llm.tokenize("a", parse_special=v)
    yield "tokens", llm.detokenize
    yield "a token of them", lambda v: llm.detokenize([v])
    yield "special", lambda v: llm.detokenize([1], special=v)
    yield "abort", llm.abort


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, **{**SETTINGS, "n_ctx": 512}) as opened:
        yield opened


def test_calls(llm: LLM, recwarn: pytest.WarningsRecorder) -> None:
    for name, call in calls(llm):
        for make in VALUES:
            value = make()
            try:
                attempt(lambda call=call, value=value: call(value))
            except Exception as error:
                raise AssertionError(f"{name}: {value!r}") from error
    assert [str(warning.message) for warning in recwarn] == []
    assert llm.stats().blocks_used == 0 or llm.stats().idle == 1


def test_trace(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def record(path: Any) -> None:
        with llm.trace(path):
            pass

    for make in VALUES:
        value = make()
        attempt(lambda value=value: record(value))


FLAGS = [
    ("generate", "return_errors", ("a",)),
    ("embed", "normalize", ("a",)),
    ("tokenize", "add_special", ("a",)),
    ("tokenize", "parse_special", ("a",)),
    ("detokenize", "special", ([1],)),
    ("chat", "add_generation_prompt", (HELLO,)),
    ("chat", "continue_final_message", (HELLO,)),
    ("chat_prompt", "add_generation_prompt", (HELLO,)),
]


@pytest.mark.parametrize(("method", "name", "given"), FLAGS)
def test_flags_are_true_or_false(llm: LLM, method: str, name: str, given: tuple[Any, ...]) -> None:
    for value in (None, 1, 0, "yes", np.bool_(True), np.array([1, 2])):
        with pytest.raises(ArgumentError, match=rf"{name}=.*: give True or False"):
            getattr(llm, method)(*given, **{name: value})


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda llm: llm.detokenize(5), RequestError, "tokens=5: give a list of token ids"),
        (lambda llm: llm.detokenize("ab"), RequestError, "tokens='ab': give a list of token ids"),
        (lambda llm: llm.detokenize([float("nan")]), RequestError, r"whole numbers of 32 bits, got \[nan\]"),
        (lambda llm: llm.detokenize([10**9]), RequestError, "token 1000000000 is not in the vocabulary"),
        (lambda llm: llm.embed("a", pooling=["mean"]), RequestError, r"pooling=\['mean'\]: give one of"),
        (lambda llm: llm.trace(5).__enter__(), ArgumentError, "path=5: give the path of a file"),
        (lambda llm: llm.beam_search("a", {}), RequestError, "{}.*give a BeamSearchParams"),
        (lambda llm: llm.session("a").generate({}), RequestError, "params={}: give a SamplingParams"),
        (lambda llm: llm.generate("a", {}), RequestError, "params={}: give a SamplingParams, or a list"),
        (lambda llm: llm.generate(["a"], [5]), RequestError, r"params\[0\]=5: give a SamplingParams"),
        (lambda llm: llm.generate(["a", [1.5]]), RequestError, r"prompts\[1\] is \[1.5\]: give a string"),
        (lambda llm: llm.generate(HELLO), RequestError, "use chat for messages"),
        (lambda llm: llm.stream(["a", "b"]), RequestError, r"\['a', 'b'\]: .*; stream takes one prompt"),
        (lambda llm: llm.session({}), RequestError, "the prompt is {}: give a string"),
        (
            lambda llm: llm.session(b""),
            RequestError,
            "the prompt is b'': give a string",
        ),
        (lambda llm: llm.chat(HELLO, tools=np.array([1, 2])), RequestError, "tools are a list"),
        (lambda llm: llm.chat(HELLO, template_arguments=[]), RequestError, r"template_arguments=\[\]: give"),
        (lambda llm: SamplingParams(stop_token_ids=b"x"), RequestError, "stop_token_ids=b'x': give a list"),
        (lambda llm: SamplingParams(stop={"a": 1}), RequestError, "stop={'a': 1}: give a string or several"),
        (
            lambda llm: LLM("x", max_model_len=np.array([1, 2])),
            ConfigError,
            r"max_model_len=array\(\[1, 2\]\): give an integer",
        ),
        (lambda llm: LLM("x", n_ctx="5", max_model_len=5), ConfigError, "n_ctx='5': give an integer"),
        (
            lambda llm: LLM("x", max_batch_tokens=True, max_num_batched_tokens=4),
            ConfigError,
            "max_batch_tokens=True: give an integer",
        ),
    ],
)
def test_errors(llm: LLM, call: Callable[[LLM], Any], kind: type[VeloError], text: str) -> None:
    with pytest.raises(kind, match=text):
        call(llm)


def test_asyncio_refuses_the_same(tiny_model: Path) -> None:
    async def body() -> None:
        async with AsyncLLM(tiny_model, **SETTINGS) as llm:
            for make in VALUES:
                value = make()
                for call in (
                    lambda value=value: llm.generate(value, SHORT),
                    lambda value=value: llm.generate("a", SHORT, request_id=value),
                    lambda value=value: llm.generate("a", SHORT, return_errors=value),
                    lambda value=value: llm.chat(value, SHORT),
                    lambda value=value: llm.chat(HELLO, SHORT, tools=value),
                    lambda value=value: llm.beam_search(value, BEAMS),
                    lambda value=value: llm.session("a", cache_salt=value),
                    lambda value=value: llm.embed("a", pooling=value),
                    lambda value=value: llm.detokenize(value),
                    lambda value=value: llm.abort(value),
                ):
                    with suppress(VeloError):
                        await call()

    asyncio.run(asyncio.wait_for(body(), 120))
