"""Prompts and parameters that are refused, with the numbers in the messages."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pyvelo import SamplingParams
from pyvelo.engine.input_processor import InputProcessor
from pyvelo.errors import OutOfBlocks, RequestError
from pyvelo.kv.prefix import BlockLayout
from pyvelo.memory.budget import PoolSize

from .fakes import token_bytes


@dataclass
class Vocab:
    n_tokens: int = 100


class FakeModel:
    vocab = Vocab()
    info = SimpleNamespace(has_recurrent=False, n_ctx_train=4096)
    token_bytes = staticmethod(token_bytes)

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        return [min(ord(character), 99) for character in text]


def processor(n_ctx: int = 128, n_blocks: int = 8, seed: int | None = None) -> InputProcessor:
    pool = PoolSize(n_blocks, n_blocks * 32, n_ctx, n_blocks * 32 // n_ctx)
    return InputProcessor(cast(Any, FakeModel()), pool, BlockLayout(32), seed)


def test_a_text_and_its_tokens() -> None:
    submission = processor().prepare("AB", SamplingParams())
    assert submission.prompt == "AB"
    assert submission.requests[0].prompt_ids == (65, 66)
    assert processor().prepare([65, 66], SamplingParams()).prompt is None
    assert processor().prepare(np.array([65, 66]), SamplingParams()).requests[0].prompt_ids == (65, 66)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "no tokens"),
        ([], "no tokens"),
        ([1, 100], "token 100 does not exist: ids go from 0 to 99"),
        ([-1], "token -1 does not exist"),
        ([1.5], "a string or a list of token ids"),
        ([3, True], "a string or a list of token ids"),
        (["a", 1], "a string or a list of token ids"),
        (b"abc", "a string or a list of token ids"),
        (None, "a string or a list of token ids"),
        ([1] * 128, "the prompt has 128 tokens.*n_ctx=128: shorten it to 127 tokens"),
    ],
)
def test_prompts_that_are_none(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        processor().prepare(prompt, SamplingParams())


def test_a_context_of_one_token_has_no_room_for_a_prompt() -> None:
    with pytest.raises(RequestError, match="together get n_ctx=1: raise n_ctx"):
        processor(n_ctx=1).prepare([1], SamplingParams())


def test_a_context_that_is_the_trained_one_is_not_to_be_raised() -> None:
    with pytest.raises(RequestError, match="n_ctx=4096: shorten it to 4095 tokens or take a model that was"):
        processor(n_ctx=4096).prepare([1] * 5000, SamplingParams())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [5, 100]}, "stop_token_ids: token 100 does not exist, ids go up to 99"),
        ({"logit_bias": {100: 1.0}}, "logit_bias: token 100 does not exist"),
    ],
)
def test_tokens_in_the_parameters_must_exist(params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        processor().prepare([1], SamplingParams(**params))


def test_parameters_of_another_kind() -> None:
    with pytest.raises(RequestError, match="give a SamplingParams"):
        processor().prepare([1], cast(Any, {"max_tokens": 3}))


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "max_new"),
    [(1, 16, 16), (100, 28, 28), (100, 29, 28), (127, 16, 1), (1, None, 127), (120, None, 8)],
)
def test_an_answer_ends_with_the_context(n_prompt: int, max_tokens: int | None, max_new: int) -> None:
    request = processor().prepare([1] * n_prompt, SamplingParams(max_tokens=max_tokens)).requests[0]
    assert request.max_new == max_new
    assert request.max_stored == n_prompt + max_new - 1 < 128


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    small = processor(n_ctx=1024, n_blocks=8)
    assert small.prepare([1] * 200, SamplingParams(max_tokens=57)).requests[0].max_stored == 256
    with pytest.raises(OutOfBlocks) as refused:
        small.prepare([1] * 200, SamplingParams(max_tokens=58))
    message = str(refused.value)
    assert (
        "200 tokens of prompt and up to 58 of answer need 9 blocks of 32 tokens, the whole pool has 8"
        in message
    )
    assert "raise kv_cache_bytes" in message
    assert isinstance(refused.value, MemoryError)


def test_without_a_limit_an_answer_ends_with_the_pool() -> None:
    small = processor(n_ctx=1024, n_blocks=8)
    assert small.prepare([1] * 200, SamplingParams(max_tokens=None)).requests[0].max_stored == 256
    with pytest.raises(OutOfBlocks, match="257 tokens of prompt and up to 1 of answer need 9 blocks"):
        small.prepare([1] * 257, SamplingParams(max_tokens=None))


def test_samples_differ_by_their_seeds() -> None:
    requests = processor().prepare([1], SamplingParams(n=3, seed=7)).requests
    assert [(request.index, request.seed) for request in requests] == [(0, 7), (1, 8), (2, 9)]
    largest = (1 << 64) - 1
    assert [r.seed for r in processor().prepare([1], SamplingParams(n=2, seed=largest)).requests] == [
        largest,
        0,
    ]


def test_seeds_of_the_engine() -> None:
    def seeds(seed: int | None) -> list[int]:
        made = processor(seed=seed)
        return [made.prepare([1], SamplingParams()).requests[0].seed for _ in range(3)]

    assert seeds(5) == seeds(5)
    assert len({*seeds(5), *seeds(6), *seeds(None)}) == 9
