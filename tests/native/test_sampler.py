"""Sampling, compared with NumPy."""

from __future__ import annotations

import math
import operator
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyvelo import SamplingParams
from pyvelo.errors import ClosedError, ConfigError, RequestError
from pyvelo.native import Context, Model, Sampler, StepArrays
from pyvelo.native._ffi import lib

from .steps import Seq, logits_of, run

Logits = npt.NDArray[np.float32]

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


@pytest.fixture
def logits(context: Context, arrays: StepArrays) -> Logits:
    """Return the logits of two sequences after one step: [2, n_vocab]."""
    run(context, arrays, [(Seq([0]), PROMPT), (Seq([1]), PROMPT[::-1])])
    return logits_of(context, 2)


def draw(context: Context, sampler: Sampler, n: int, row: int = 0) -> list[int]:
    rows = np.full(1, row, np.int32)
    tokens = []
    for _ in range(n):
        drawn, statuses = context.sample(rows, [sampler])
        assert statuses[0] == 0
        tokens.append(int(drawn[0]))
    return tokens


def adjusted(
    logits: Logits,
    prompt: list[int],
    output: list[int],
    *,
    bias: dict[int, float] | None = None,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> npt.NDArray[np.float64]:
    """Apply bias, then penalties."""
    x = logits.astype(np.float64)
    for token, value in (bias or {}).items():
        x[token] += value
    for token in set(prompt) | set(output):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, count in Counter(output).items():
        x[token] -= presence + frequency * count
    return x


def distribution(
    x: npt.NDArray[np.float64],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> npt.NDArray[np.float64]:
    """Apply temperature, top-k, top-p and min-p. Return the probabilities of the tokens."""
    order = np.argsort(-x, kind="stable")[: top_k or None]
    p = np.exp((x[order] - x.max()) / temperature)
    p /= p.sum()
    if top_p < 1:
        p = p[: np.searchsorted(np.cumsum(p), top_p) + 1]
    p = p[p >= min_p * p[0]]
    out = np.zeros_like(x)
    out[order[: len(p)]] = p / p.sum()
    return out


# ---- greedy ----


def test_greedy_takes_the_largest(context: Context, model: Model, logits: Logits) -> None:
    with Sampler(model, temperature=0, seed=1) as a, Sampler(model, top_k=1, seed=2) as b:
        tokens, statuses = context.sample(np.array([0, 1], np.int32), [a, b])
    assert tokens.tolist() == logits.argmax(axis=1).tolist()
    assert statuses.tolist() == [0, 0]


def test_greedy_takes_the_lowest_id_of_equals(context: Context, model: Model, logits: Logits) -> None:
    """Biases make several tokens exactly equal, as floats."""
    x = logits[0]
    high = np.float32(64.0)
    chosen = [200, 5, 131, 77]
    bias = {token: float(np.float64(high) - np.float64(x[token])) for token in chosen}
    reached = {token: np.float32(x[token]) + np.float32(value) for token, value in bias.items()}
    best = max(reached.values())
    expected = min(token for token, value in reached.items() if value == best)
    with Sampler(model, temperature=0, seed=0, logit_bias=bias) as sampler:
        assert draw(context, sampler, 3) == [expected] * 3
    with Sampler(model, temperature=0, seed=0, logit_bias=dict.fromkeys(chosen, 1e30)) as sampler:
        assert draw(context, sampler, 3) == [5] * 3


def test_rows_in_any_order_and_more_than_once(context: Context, model: Model, logits: Logits) -> None:
    best = logits.argmax(axis=1).tolist()
    samplers = [Sampler(model, temperature=0, seed=0) for _ in range(4)]
    tokens, _ = context.sample(np.array([1, 0, 1, 1], np.int32), samplers)
    assert tokens.tolist() == [best[1], best[0], best[1], best[1]]
    tokens, _ = context.sample(np.array([1, 0], np.int64)[::-1], samplers[:2])  # type: ignore[arg-type]
    assert tokens.tolist() == best
    tokens, statuses = context.sample(np.empty(0, np.int32), [])
    assert tokens.shape == statuses.shape == (0,)


# ---- bias and penalties ----


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition": 1.3},
        {"repetition": 0.8},
        {"presence": 1.5},
        {"frequency": 0.7},
        {"frequency": -0.5},
        {"repetition": 1.2, "presence": 0.5, "frequency": 0.4},
        {"repetition": 1.2, "presence": 0.5, "bias": {7: 4.0, 20: -math.inf, 30: 2.5}},
    ],
)
def test_penalties_change_logits_by_their_numbers(
    context: Context, model: Model, logits: Logits, settings: dict[str, Any]
) -> None:
    """Sample greedily from one row: only the penalties change the token."""
    with Sampler(
        model,
        temperature=0,
        seed=0,
        repetition_penalty=settings.get("repetition", 1.0),
        presence_penalty=settings.get("presence", 0.0),
        frequency_penalty=settings.get("frequency", 0.0),
        logit_bias=settings.get("bias"),
    ) as sampler:
        prompt = np.argsort(-logits[0])[:4].tolist()
        sampler.see_prompt(prompt[:2])
        sampler.see_prompt(np.array(prompt[2:], np.int32))
        output: list[int] = []
        for _ in range(60):
            expected = int(adjusted(logits[0], prompt, output, **settings).argmax())
            assert draw(context, sampler, 1) == [expected]
            output.append(expected)
    if settings != {"frequency": -0.5} and settings != {"repetition": 0.8}:
        assert len(set(output)) > 1


def test_penalties_remember_more_than_64_tokens(context: Context, model: Model, logits: Logits) -> None:
    with Sampler(model, temperature=0, seed=0, presence_penalty=1e6) as sampler:
        n = 200
        tokens = draw(context, sampler, n)
    assert tokens == np.argsort(-logits[0], kind="stable")[:n].tolist()


def test_the_prompt_counts_for_repetition_alone(context: Context, model: Model, logits: Logits) -> None:
    best = int(logits[0].argmax())
    with Sampler(model, temperature=0, seed=0, presence_penalty=1e6, frequency_penalty=1e6) as sampler:
        sampler.see_prompt([best] * 5)
        assert draw(context, sampler, 1) == [best]


def test_banned_tokens_are_never_sampled(context: Context, model: Model, logits: Logits) -> None:
    keep = {11, 12, 13}
    bias = {token: -math.inf for token in range(context.n_vocab) if token not in keep}
    with Sampler(model, temperature=5.0, seed=0, logit_bias=bias) as sampler:
        assert set(draw(context, sampler, 200)) == keep


# ---- drawing ----


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_k": 10**9},
        {"top_p": 0.5},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 0.3, "top_k": 200, "top_p": 0.99},
    ],
)
def test_samples_follow_the_distribution(
    context: Context, model: Model, logits: Logits, settings: dict[str, Any]
) -> None:
    expected = distribution(logits[0].astype(np.float64), **settings)
    n = 3000
    with Sampler(model, seed=7, **settings) as sampler:
        counts = np.bincount(draw(context, sampler, n), minlength=len(expected))
    assert (expected[counts > 0] > 0).all()
    # chi-square over tokens that are expected often enough; all other tokens are one class
    often = expected * n >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum()) * n
    valid = wanted > 0
    chi2 = float(((observed[valid] - wanted[valid]) ** 2 / wanted[valid]).sum())
    freedom = int(valid.sum()) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {5, 77, 131, 200}),
        ({"min_p": 1.0}, {5, 77, 131, 200}),
        ({"top_k": 2}, {5, 77}),
        ({"top_k": 3, "top_p": 0.6}, {5, 77}),
        ({"top_p": 0.5}, {5, 77}),
        ({"top_p": 0.51}, {5, 77, 131}),
        ({"top_p": 0.25}, {5}),
    ],
)
def test_the_lowest_ids_of_equal_tokens_stay(
    context: Context, model: Model, logits: Logits, settings: dict[str, Any], expected: set[int]
) -> None:
    bias = dict.fromkeys([200, 5, 131, 77], 1e30)
    with Sampler(model, seed=11, logit_bias=bias, **settings) as sampler:
        assert set(draw(context, sampler, 100)) == expected


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e30])
def test_extreme_temperatures(context: Context, model: Model, logits: Logits, temperature: float) -> None:
    with Sampler(model, temperature=temperature, seed=0) as sampler:
        tokens = draw(context, sampler, 50)
    if temperature < 1:
        assert set(tokens) == {int(logits[0].argmax())}
    else:
        assert len(set(tokens)) > 40


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_seeds_reproduce(context: Context, model: Model, logits: Logits, seed: int) -> None:
    runs = []
    for _ in range(2):
        with Sampler(model, temperature=2.0, seed=seed) as sampler:
            runs.append(draw(context, sampler, 40))
    assert runs[0] == runs[1]
    with Sampler(model, temperature=2.0, seed=seed ^ 12345) as sampler:
        assert draw(context, sampler, 40) != runs[0]


def test_a_sequence_samples_the_same_tokens_in_any_batch(
    context: Context, model: Model, logits: Logits
) -> None:
    with Sampler(model, temperature=1.5, seed=3) as sampler:
        alone = draw(context, sampler, 20)
    others = [Sampler(model, temperature=2.0, seed=seed, top_p=0.9) for seed in range(3)]
    with Sampler(model, temperature=1.5, seed=3) as sampler:
        rows = np.array([1, 0, 0, 1], np.int32)
        together = [int(context.sample(rows, [others[0], sampler, *others[1:]])[0][1]) for _ in range(20)]
    assert together == alone


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.7, 2.0]),
            st.sampled_from([0, 1, 5]),
            st.sampled_from([1.0, 0.8]),
            st.sampled_from([1.0, 1.3]),
            st.integers(0, 3),
        ),
        min_size=6,
        max_size=6,
    ),
    st.permutations(range(6)),
    st.sampled_from([1, 2, 3, 8]),
)
def test_threads_that_share_the_rows_sample_the_same(
    model: Model, kinds: list[tuple[float, int, float, float, int]], order: list[int], n_threads: int
) -> None:
    def samplers() -> list[Sampler]:
        made = []
        for temperature, top_k, top_p, penalty, masked in kinds:
            sampler = Sampler(
                model, temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=penalty, seed=7
            )
            sampler.see_prompt(PROMPT)
            if masked:
                sampler.mask(bytes([0x11 * masked] * math.ceil(model.info.n_vocab / 8)))
            made.append(sampler)
        return made

    with Context(
        model, n_blocks=16, max_batch_tokens=64, max_seqs=6, max_seq_len=64, n_threads=n_threads
    ) as context:
        arrays = StepArrays(max_tokens=64, max_seqs=6, max_width=4, max_copies=4)
        run(context, arrays, [(Seq([row]), PROMPT[row:]) for row in range(6)])
        before = logits_of(context, 6)
        rows = np.array(order, np.int32)
        one_by_one, together = samplers(), samplers()
        alone = [
            [draw(context, sampler, 1, row)[0] for sampler, row in zip(one_by_one, order, strict=True)]
            for _ in range(3)
        ]
        drawn = [context.sample(rows, together)[0].tolist() for _ in range(3)]
        assert drawn == alone
        tokens = np.array(alone[-1], np.int32)
        one_each = [context.logprobs(rows[[i]], tokens[[i]], 3) for i in range(6)]
        for found, expected in zip(
            context.logprobs(rows, tokens, 3), zip(*one_each, strict=True), strict=True
        ):
            np.testing.assert_array_equal(found, np.concatenate(expected))
        np.testing.assert_array_equal(logits_of(context, 6), before)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_another_thread_than_the_steps_samples_without_a_team(model: Model, arrays: StepArrays) -> None:
    def n_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    with Context(model, n_blocks=16, max_batch_tokens=64, max_seqs=4, max_seq_len=64, n_threads=5) as context:
        run(context, arrays, [(Seq([row]), PROMPT[row:]) for row in range(4)])
        rows = np.arange(4, dtype=np.int32)
        samplers = [Sampler(model, temperature=0, seed=0) for _ in range(4)]
        before = n_threads()
        with ThreadPoolExecutor(1) as other:
            found = other.submit(context.sample, rows, samplers).result()[0]
            assert n_threads() == before + 1
        assert found.tolist() == logits_of(context, 4).argmax(axis=1).tolist()
        assert context.sample(rows, samplers)[0].tolist() == found.tolist()
        assert n_threads() <= before + 1


# ---- what fails ----


def test_a_row_that_is_not_a_number_fails_alone(context: Context, model: Model, arrays: StepArrays) -> None:
    good, bad = Seq([0]), Seq([1])
    run(context, arrays, [(good, PROMPT), (bad, PROMPT)])
    context.fill_blocks([1], 0xFF)
    run(context, arrays, [(good, [1]), (bad, [1])])
    assert np.isnan(context.logits(1)).all()
    best = int(context.logits(0).argmax())
    for temperature in (0.0, 1e-9):
        samplers = [Sampler(model, seed=0, temperature=temperature) for _ in range(3)]
        tokens, statuses = context.sample(np.array([0, 1, 0], np.int32), samplers)
        assert tokens.tolist() == [best, -1, best]
        assert statuses.tolist() == [0, lib.VELO_FAILED, 0]


def test_all_banned(context: Context, model: Model, logits: Logits) -> None:
    bias = dict.fromkeys(range(context.n_vocab), -math.inf)
    for temperature in (0.0, 1.0):
        with Sampler(model, temperature=temperature, seed=0, logit_bias=bias) as sampler:
            tokens, statuses = context.sample(np.zeros(1, np.int32), [sampler])
            assert (tokens[0], statuses[0]) == (-1, lib.VELO_FAILED)


def test_rows_and_samplers_are_checked_before_any_sample(
    context: Context, model: Model, logits: Logits
) -> None:
    first = Sampler(model, temperature=2.0, seed=5)
    second = Sampler(model, seed=0)
    expected = draw(context, Sampler(model, temperature=2.0, seed=5), 10)
    for rows in ([0, 2], [0, -1], [0, 2**31 - 1]):
        with pytest.raises(ConfigError, match="row"):
            context.sample(np.array(rows, np.int32), [first, second])
    with pytest.raises(ConfigError, match="2 samplers need as many rows"):
        context.sample(np.zeros(3, np.int32), [first, second])
    second.close()
    with pytest.raises(ClosedError, match="a sampler was closed"):
        context.sample(np.zeros(2, np.int32), [first, second])
    with pytest.raises(ClosedError):
        second.see_prompt([1])
    assert draw(context, first, 10) == expected


def test_a_sampler_of_another_model(context: Context, logits: Logits, tiny_model: Any) -> None:
    with Model(tiny_model) as other:
        sampler = Sampler(other, seed=0)
    with pytest.raises(ConfigError, match="sampler 0 was made for another model"):
        context.sample(np.zeros(1, np.int32), [sampler])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, but must be a finite number, 0 or more"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 1e300}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2**31}, "32 bits"),
        ({"top_p": 0.0}, "top_p is 0, but must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1, but must be from 0 to 1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0, but must be a finite number above 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan"),
        ({"frequency_penalty": -math.inf}, "frequency_penalty is -inf"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"logit_bias": {-1: 1.0}}, "a bias names token -1"),
        ({"logit_bias": {10**6: 1.0}}, "a bias names token 1000000"),
        ({"logit_bias": {1: math.nan}}, "the bias of token 1 is nan"),
        ({"logit_bias": {1: math.inf}}, "the bias of token 1 is inf"),
        ({"logit_bias": {2**40: 1.0}}, "32 bits"),
    ],
)
def test_settings_out_of_range(model: Model, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampler(model, **{"seed": 0, **settings})


def test_prompts_out_of_range(model: Model) -> None:
    with Sampler(model, seed=0, repetition_penalty=1.1) as sampler:
        for tokens in ([-1], [1, 10**6]):
            with pytest.raises(ConfigError, match="is not in the vocabulary"):
                sampler.see_prompt(tokens)


def test_only_tokens_of_the_mask_are_sampled(model: Model, context: Context, logits: Logits) -> None:
    n = context.n_vocab
    allowed = [3, 8, n - 1]
    bits = bytearray(-(-n // 8))
    for token in allowed:
        bits[token // 8] |= 1 << token % 8
    with Sampler(model, temperature=0, seed=0) as sampler:
        unmasked = draw(context, sampler, 1)
        sampler.mask(bytes(bits))
        assert draw(context, sampler, 2) == [max(allowed, key=lambda token: logits[0, token])] * 2
        sampler.mask(b"")
        assert draw(context, sampler, 1) == unmasked
    with Sampler(model, seed=1, logit_bias={5: 100.0}) as sampler:
        sampler.mask(bytes(bits))
        drawn = Counter(draw(context, sampler, 2000))
        assert set(drawn) <= set(allowed), "a bias does not undo it"
        weights = np.exp(logits[0, allowed].astype(np.float64))
        for token, weight in zip(allowed, weights / weights.sum(), strict=True):
            assert drawn[token] / 2000 == pytest.approx(weight, abs=0.05)


def test_an_empty_mask_samples_no_token(model: Model, context: Context, logits: Logits) -> None:
    with Sampler(model, seed=0) as sampler:
        sampler.mask(bytes(-(-context.n_vocab // 8)))
        tokens, statuses = context.sample(np.zeros(1, np.int32), [sampler])
        assert tokens[0] == -1
        assert statuses[0] != 0
        with pytest.raises(ConfigError, match="too short"):
            sampler.mask(b"\xff")
    with pytest.raises(ClosedError):
        sampler.mask(b"")


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def test_logprobs_are_the_log_softmax_of_the_logits(context: Context, logits: Logits) -> None:
    rows = np.array([1, 0, 1], np.int32)
    tokens = np.array([7, 0, context.n_vocab - 1], np.int32)
    chosen, top_tokens, top = context.logprobs(rows, tokens, 5)
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        wanted = log_softmax(logits[row])
        assert chosen[i] == pytest.approx(wanted[token], abs=1e-5)
        best = np.lexsort((np.arange(len(wanted)), -logits[row]))[:5]
        assert top_tokens[i].tolist() == best.tolist()
        assert top[i] == pytest.approx(wanted[best], abs=1e-5)


def test_logprobs_of_all_tokens_sum_to_one(context: Context, logits: Logits) -> None:
    n = context.n_vocab
    _, tokens, top = context.logprobs(np.zeros(1, np.int32), np.zeros(1, np.int32), n)
    assert sorted(tokens[0].tolist()) == list(range(n))
    assert (np.diff(top[0]) <= 0).all()
    assert np.exp(top[0].astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)


def test_logprobs_with_invalid_arguments_raise(context: Context, logits: Logits) -> None:
    row, token = np.zeros(1, np.int32), np.zeros(1, np.int32)
    assert [part.shape for part in context.logprobs(row, token)] == [(1,), (1, 0), (1, 0)]
    n = context.n_vocab
    for wrong_row, wrong_token, k in [
        (2, 0, 1),
        (-1, 0, 1),
        (0, -1, 1),
        (0, n, 1),
        (0, 0, -1),
        (0, 0, n + 1),
    ]:
        with pytest.raises(ConfigError):
            context.logprobs(row + wrong_row, token + wrong_token, k)
    with pytest.raises(ConfigError, match="equally many"):
        context.logprobs(row, np.zeros(2, np.int32), 1)


# ---- settings ----


SMALL = st.sampled_from([5e-324, 1e-310, 1e-50, 1e-45, 1e-40, 1.17e-38, 2.0**-126, 1e-30, 1e-7])
FLOATS = st.floats(-2.0, 2.0) | SMALL | SMALL.map(operator.neg) | st.floats()
FIELDS = [
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.dictionaries(st.sampled_from(FIELDS), FLOATS, min_size=1), bias=FLOATS)
def test_every_valid_value_of_sampling_params_samples_a_token(
    context: Context, model: Model, logits: Logits, values: dict[str, float], bias: float
) -> None:
    given_: dict[str, Any] = dict(values)
    try:
        params = SamplingParams(**given_, logit_bias={7: bias})
    except RequestError:
        return
    chosen = {name: getattr(params, name) for name in FIELDS}
    with Sampler(model, seed=1, logit_bias=params.logit_bias, **chosen) as sampler:
        sampler.see_prompt(range(50))
        draw(context, sampler, 4)


def test_a_small_repetition_penalty_makes_no_infinity(context: Context, model: Model, logits: Logits) -> None:
    best = int(logits[0].argmax())
    with Sampler(model, seed=1, repetition_penalty=2.0**-126, logit_bias={best: 50.0}) as sampler:
        sampler.see_prompt([best])
        assert draw(context, sampler, 2) == [best, best]
