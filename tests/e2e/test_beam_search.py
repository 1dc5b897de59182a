"""Beam search and best_of, against the same by hand: whole prompts, all logprobs, no sharing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pyvelo import LLM, BeamSearchParams, SamplingParams
from pyvelo.errors import OutOfBlocks, RequestError

PROMPTS = [[3, 14, 15, 92, 65], [9] * 40, [5 * i % 300 + 3 for i in range(70)]]
ALL = 1024  # the likeliest tokens, which are all that a beam could take

Found = list[tuple[tuple[int, ...], float]]


@pytest.fixture
def plain(tiny_model_f32: Path) -> Iterator[LLM]:
    with LLM(tiny_model_f32, n_threads=1, deterministic=True, prefix_cache=False) as llm:
        yield llm


def by_hand(
    llm: LLM, prompt: Sequence[int], width: int, n: int, ends: Sequence[int], penalty: float
) -> Found:
    """Beam search in its simplest form: nothing is shared, nothing ends early."""
    one = SamplingParams(max_tokens=1, temperature=0, logprobs=ALL)
    beams: Found = [((), 0.0)]
    ended: Found = []
    for length in range(1, n + 1):
        found: Found = []
        for tokens, total in beams:
            (given,) = llm.generate([*prompt, *tokens], one)[0].outputs[0].logprobs or ()
            found += [((*tokens, token), total + logprob) for token, logprob in given.top]
        found.sort(key=lambda beam: -beam[1])
        beams = []
        for beam in found:
            if len(beams) == width:
                break
            (ended if beam[0][-1] in ends or length == n else beams).append(beam)
            if length == n and len(ended) > ALL:
                break
    return sorted(ended, key=lambda beam: -beam[1] / len(beam[0]) ** penalty)[:width]


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("width", [1, 3, 5])
def test_the_beams_equal_a_plain_search(plain: LLM, tiny_model_f32: Path, width: int, penalty: float) -> None:
    ends = (990, 1086, 441)  # tokens that this model likes
    params = BeamSearchParams(
        beam_width=width, max_tokens=6, length_penalty=penalty, stop_token_ids=ends, ignore_eos=True
    )
    with LLM(tiny_model_f32, n_threads=1, deterministic=True) as llm:
        outputs = llm.beam_search(PROMPTS, params)
        assert llm.stats().blocks_used == llm.stats().idle == 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        wanted = by_hand(plain, prompt, width, 6, ends, penalty)
        assert [answer.token_ids for answer in output.outputs] == [tokens for tokens, _ in wanted]
        totals = [answer.cumulative_logprob for answer in output.outputs]
        assert totals == pytest.approx([total for _, total in wanted], abs=1e-4)
        for answer in output.outputs:
            stopped = answer.token_ids[-1] in ends
            assert answer.finish_reason == ("stop" if stopped else "length")
            said = plain.detokenize(answer.token_ids[: -1 if stopped else None])
            assert answer.text.strip() == said.strip()


def test_a_beam_of_one_is_greedy(plain: LLM) -> None:
    greedy = plain.generate("Hello there", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0]
    beams = plain.beam_search("Hello there", BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True))[
        0
    ]
    assert beams.token_ids == greedy.token_ids
    assert beams.text == greedy.text
    assert beams.prompt == "Hello there"


def test_beams_share_the_prompt_and_survive_a_small_pool(tiny_model_f32: Path, plain: LLM) -> None:
    params = BeamSearchParams(beam_width=6, max_tokens=40, ignore_eos=True)
    wanted = plain.beam_search([PROMPTS[2]], params)[0]
    for size in (1 << 18, 1 << 19):
        with LLM(tiny_model_f32, n_threads=1, deterministic=True, n_ctx=128, kv_cache_bytes=size) as llm:
            output = llm.beam_search([PROMPTS[2]], params)[0]
            assert [answer.token_ids for answer in output.outputs] == [a.token_ids for a in wanted.outputs]
            assert llm.stats().blocks_total < 6 * 4, "not as many as six sequences need"


def test_what_is_wrong_with_a_search_is_said(plain: LLM) -> None:
    for name, value in [
        ("beam_width", 0),
        ("beam_width", 257),
        ("max_tokens", None),
        ("length_penalty", 1e9),
    ]:
        with pytest.raises(RequestError, match=name):
            BeamSearchParams(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="BeamSearchParams"):
        plain.beam_search("a", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="does not exist"):
        plain.beam_search([[3], [10**6]])
    with pytest.raises(RequestError, match="stop_token_ids: token 100000000 does not exist"):
        plain.beam_search("a", BeamSearchParams(stop_token_ids=[3, 10**8]))
    with pytest.raises((RequestError, OutOfBlocks)):
        plain.beam_search([[3] * 100_000])


def test_a_wrong_prompt_of_several_is_named(plain: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompts\[1\] has 100000 tokens"):
        plain.beam_search([PROMPTS[0], [5] * 100_000])
    with pytest.raises(RequestError, match=r"prompts\[1\] has no tokens"):
        plain.beam_search([PROMPTS[0], []])


def test_the_best_of_several_are_the_likeliest(plain: LLM) -> None:
    settings = {"max_tokens": 12, "seed": 5, "ignore_eos": True}
    every = plain.generate("Hello", SamplingParams(n=7, logprobs=0, **settings))[0].outputs  # type: ignore[arg-type]
    mean = {a.token_ids: (a.cumulative_logprob or 0.0) / len(a.token_ids) for a in every}
    best = plain.generate("Hello", SamplingParams(n=3, best_of=7, **settings))[0]  # type: ignore[arg-type]
    assert [answer.token_ids for answer in best.outputs] == sorted(mean, key=lambda a: -mean[a])[:3]
    assert [answer.index for answer in best.outputs] == [0, 1, 2]
    assert all(answer.logprobs is None for answer in best.outputs)
    assert best.usage.completion_tokens == 7 * 12
    with pytest.raises(RequestError, match="stream"):
        plain.stream("Hello", SamplingParams(n=1, best_of=2))


def test_logprobs_equal_the_ones_of_the_tokens_alone(plain: LLM) -> None:
    """Each token's, against what the model says of it after the tokens before."""
    answer = plain.generate("Hello", SamplingParams(max_tokens=5, seed=1, logprobs=3))[0]
    given = answer.outputs[0].logprobs
    assert given is not None
    assert [token.token_id for token in given] == list(answer.token_ids)
    for at, token in enumerate(given):
        before = [*answer.prompt_token_ids, *answer.token_ids[:at]]
        one = SamplingParams(max_tokens=1, temperature=0, logprobs=ALL)
        (again,) = plain.generate(before, one)[0].outputs[0].logprobs or ()
        assert token.top == again.top[:3]
        assert dict(again.top).get(token.token_id, token.logprob) == token.logprob
        assert again.logprob == again.top[0][1]
