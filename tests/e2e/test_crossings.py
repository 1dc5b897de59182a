"""Random requests, streams, sessions and searches of several threads in a small pool: each as if alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pyvelo.kv.prefix
from pyvelo import LLM, BeamSearchParams, RequestOutput, SamplingParams, Session

from .conftest import MakeModel

N_CTX = 256
LENGTHS = (1, 31, 32, 33, 63, 64, 65, 66, 95, 97)
PLAIN: dict[str, list[Any]] = {
    "max_tokens": [1, 3, 17, 32, 33],
    "min_tokens": [0, 0, 1],
    "skip_special_tokens": [True, False],
    "temperature": [0, 0, 0.5, 2.0],
    "top_k": [0, -1, 5],
    "top_p": [1, 1, 0.8],
    "repetition_penalty": [1, 1, 0.8, 1.3],
    "presence_penalty": [0, 0, 1.0],
    "ignore_eos": [False, True],
    "stop": [(), (), ["a", "e"], ["th", "ing"]],
    "logprobs": [None, None, 0, 3],
    "echo": [False, False, True],
    "logit_bias": [None, None, None, dict.fromkeys(range(3, 259), 100.0)],
    "grammar": [None, None, None, 'root ::= ("fox" | "bear") (" and " ("fox" | "bear")){3,6}'],
    "seed": [1, 2],
}
SAMPLES: dict[str, list[Any]] = {
    "n": [1, 1, 3],
    "best_of": [None, None, 4],
    "prompt_logprobs": [None, None, 2],
}
NO_MATTER: dict[str, list[Any]] = {"priority": [0, 0, 2], "cache_salt": ["", "", "a"]}

Params = dict[str, Any]


KINDS = ("llama", "gpt-oss --experts 4 --window 40", "lfm2")
"""Layers without and with a window, and recurrent ones."""


@pytest.fixture(scope="module", params=KINDS)
def model(make_model: MakeModel, request: pytest.FixtureRequest) -> Path:
    return make_model("tiny", "--arch", *request.param.split(), "--type", "f32")


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[LLM]:
    with LLM(model, deterministic=True, prefix_cache=False, n_ctx=N_CTX, n_threads=1) as llm:
        yield llm


def settings_of(rng: random.Random) -> dict[str, Any]:
    return {
        "n_ctx": N_CTX,
        "n_threads": 1,
        "kv_cache_bytes": rng.choice([16, 24]) << 15,
        "max_num_seqs": rng.choice([1, 3, 8]),
        "max_batch_tokens": rng.choice([16, 33, 512]),
        "swap_bytes": rng.choice([0, 1 << 17]),
    }


def drawn(rng: random.Random, *choices: dict[str, list[Any]]) -> Params:
    return {name: rng.choice(values) for some in choices for name, values in some.items()}


def prompt_of(rng: random.Random) -> list[int]:
    shared, own = rng.choice(LENGTHS), rng.choice((0, 0, 1, 32))
    return [3 + 11 * i % 200 for i in range(shared)] + [rng.randrange(3, 250) for _ in range(own)]


class Client:
    """Random calls of one thread; `expected` gives what a request gives alone."""

    def __init__(self, llm: LLM, seed: int, expected: Callable[[list[int], Params], RequestOutput]) -> None:
        self.llm = llm
        self.rng = random.Random(seed)
        self.expected = expected
        self.errors: list[BaseException] = []
        self.sessions: list[Session] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for _ in range(10):
                self.rng.choice([self.request, self.stream, self.session, self.session, self.search])()
            for session in self.sessions:
                session.close()
        except BaseException as error:
            self.errors.append(error)

    def request(self) -> None:
        prompt, params = prompt_of(self.rng), drawn(self.rng, PLAIN, SAMPLES)
        given = SamplingParams(**params, **drawn(self.rng, NO_MATTER))
        (output,) = self.llm.generate([prompt], given)
        wanted = self.expected(prompt, params)
        assert (output.outputs, output.prompt_logprobs) == (wanted.outputs, wanted.prompt_logprobs), params

    def stream(self) -> None:
        """Perhaps not to its end."""
        prompt, params = prompt_of(self.rng), drawn(self.rng, PLAIN)
        pieces = self.llm.stream(prompt, SamplingParams(**params, **drawn(self.rng, NO_MATTER)))
        heard = [piece for piece, _ in zip(pieces, range(self.rng.choice([1, 5, 99])), strict=False)]
        pieces.close()
        wanted, text = self.expected(prompt, params), "".join(piece.text for piece in heard)
        assert wanted.token_ids[: len(heard)] == tuple(t for piece in heard for t in piece.token_ids), params
        assert wanted.text == text if heard[-1].finish_reason else wanted.text.startswith(text), params

    def session(self) -> None:
        """A turn of an old or a new session, or of its fork."""
        if not self.sessions or self.rng.random() < 0.4:
            self.sessions.append(self.llm.session(prompt_of(self.rng), cache_salt=self.rng.choice("ab")))
        session = self.rng.choice(self.sessions)
        if len(session) > 190:
            return
        if self.rng.random() < 0.4:
            session = session.fork()
            self.sessions.append(session)
        session.append([self.rng.randrange(3, 250) for _ in range(self.rng.choice([1, 31, 32]))])
        before, params = list(session.token_ids), drawn(self.rng, PLAIN)
        output, wanted = session.generate(SamplingParams(**params)), self.expected(before, params)
        assert output.outputs == wanted.outputs, params
        assert session.token_ids == (*before, *output.token_ids)

    def search(self) -> None:
        params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
        assert len(self.llm.beam_search([prompt_of(self.rng)], params)[0].outputs) == 2


@pytest.mark.parametrize("collide", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_each_as_if_alone(
    model: Path, alone: LLM, seed: int, collide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, hash_block = random.Random(f"{seed} {collide}"), pyvelo.kv.prefix.hash_block
    if collide:
        monkeypatch.setattr(pyvelo.kv.prefix, "hash_block", lambda *parts: bytes([hash_block(*parts)[0] & 3]))
    with LLM(model, deterministic=True, **settings_of(rng)) as llm:
        expected = lambda prompt, params: alone.generate([prompt], SamplingParams(**params))[0]  # noqa: E731
        clients = [Client(llm, rng.randrange(1 << 30), expected) for _ in range(4)]
        for client in clients:
            client.thread.join(100)
            assert not client.thread.is_alive()
            if client.errors:
                raise client.errors[0]
        stats = llm.stats()
        assert stats.idle == stats.running == stats.blocks_used == stats.swap_blocks_used == 0
        llm._engine.core.manager.audit()
