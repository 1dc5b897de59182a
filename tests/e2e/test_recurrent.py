"""LLM on a model that has recurrent states beside attention: each sequence keeps its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.engine.engine import Engine

from .conftest import MakeModel

PROMPTS = [[3 + (7 * i + j) % 250 for j in range(5 + 13 * i)] for i in range(7)]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


# quantized too: AMX multiplies quantized weights, and here activations have three dimensions
@pytest.fixture(scope="module", params=["f32", "q8_0"])
def hybrid(make_model: MakeModel, request: pytest.FixtureRequest) -> Path:
    return make_model("--arch", "lfm2", "--layers", "4", "--type", request.param)


@pytest.fixture
def llm(hybrid: Path) -> Iterator[LLM]:
    with LLM(hybrid, n_ctx=512, max_num_seqs=3, max_batch_tokens=40, n_threads=1) as made:
        yield made
        engine: Engine = made._engine
        assert engine.core._states is not None
        assert sorted(engine.core._states.free) == [0, 1, 2], "every state was given back"
        assert made.stats().blocks_used == 0


@pytest.fixture
def alone(hybrid: Path, request: pytest.FixtureRequest) -> list[tuple[int, ...]]:
    """What each prompt gets when nothing else was ever run."""
    answers = []
    for prompt in PROMPTS:
        with LLM(hybrid, n_ctx=512, max_num_seqs=1, n_threads=1) as llm:
            answers.append(llm.generate(prompt, params_of(request))[0].token_ids)
    return answers


def params_of(request: pytest.FixtureRequest) -> SamplingParams:
    """How many rows a step has decides how products with quantized weights round: answers begin alike."""
    return GREEDY if "f32" in request.node.name else replace(GREEDY, max_tokens=4)


def test_states_are_counted(llm: LLM) -> None:
    assert llm._engine.context.info.n_states == 3
    assert llm.stats().state_bytes > 0


def test_more_sequences_than_states(
    llm: LLM, alone: list[tuple[int, ...]], request: pytest.FixtureRequest
) -> None:
    """Prompts run in pieces, sequences come and go, states are used again."""
    assert [output.token_ids for output in llm.generate(PROMPTS, params_of(request))] == alone


def test_a_cancelled_one_leaves_nothing_in_its_state(
    llm: LLM, alone: list[tuple[int, ...]], request: pytest.FixtureRequest
) -> None:
    for prompt in PROMPTS[:4]:
        pieces = llm.stream(prompt, GREEDY)
        next(pieces)
        pieces.close()
    outputs = llm.generate(PROMPTS[3:5], params_of(request))
    assert [output.token_ids for output in outputs] == alone[3:5]
