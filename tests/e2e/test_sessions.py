"""Sessions through LLM: what they say is what a request of their tokens says, for less work."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, SamplingParams, VeloError
from pyvelo.errors import ClosedError, OutOfBlocks, RequestError
from pyvelo.native import Model

from .conftest import MakeModel

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
PROMPT = [3 + 11 * i % 200 for i in range(150)]


@pytest.fixture
def llm(tiny_model_f32: Path) -> Iterator[LLM]:
    with LLM(tiny_model_f32, n_threads=1, deterministic=True, n_ctx=512, kv_cache_bytes=4 << 20) as llm:
        yield llm


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_turns_and_forks_say_what_requests_say(tiny_model_f32: Path, prefix_cache: bool) -> None:
    with LLM(tiny_model_f32, n_threads=1, deterministic=True, prefix_cache=False, n_ctx=512) as plain:
        one = plain.generate(PROMPT, GREEDY)[0].token_ids
        two = plain.generate([*PROMPT, *one, 5, 6], GREEDY)[0].token_ids
        three = plain.generate([*PROMPT, *one, 7], GREEDY)[0]
    with LLM(tiny_model_f32, n_threads=1, deterministic=True, prefix_cache=prefix_cache, n_ctx=512) as llm:
        session = llm.session(PROMPT)
        assert session.generate(GREEDY).token_ids == one
        fork = session.fork()
        session.append([5, 6])
        fork.append([7])
        output = session.generate(GREEDY)
        assert output.token_ids == two
        assert output.usage.cached_tokens == len(PROMPT) + 20 - 1
        assert "".join(piece.text for piece in fork.stream(GREEDY)) == three.text
        assert session.token_ids == (*PROMPT, *one, 5, 6, *two)
        assert fork.token_ids == (*PROMPT, *one, 7, *three.token_ids)
        assert len(fork) == len(fork.token_ids)
        assert session.text == llm.detokenize(session.token_ids)


def test_params_under_either_name_and_truth(llm: LLM) -> None:
    session = llm.session()
    assert (len(session), bool(session)) == (0, True)
    session.append(PROMPT)
    short = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    assert len(session.generate(sampling_params=short).token_ids) == 2
    assert len(list(session.stream(sampling_params=short))) == 2
    for call in (session.generate, session.stream):
        with pytest.raises(RequestError, match="two names of one argument"):
            call(short, sampling_params=short)


def test_forks_share_memory_and_free_it(llm: LLM) -> None:
    session = llm.session(PROMPT)
    twins = [session.fork() for _ in range(8)]
    assert llm.stats().blocks_used == -(-len(PROMPT) // 32)
    assert llm.stats().idle == 9
    assert llm.stats().completion_tokens == 0
    for number, twin in enumerate(twins):
        twin.append([number + 3])
        twin.generate(GREEDY)
    # the tail, and a block more for the answer
    assert llm.stats().blocks_used <= 5 + 8 * 2
    for twin in twins:
        twin.close()
    session.close()
    assert llm.stats().blocks_used == llm.stats().idle == 0


def test_a_session_that_is_dropped_frees_its_blocks(llm: LLM) -> None:
    session = llm.session("Once upon a time")
    session.generate(GREEDY)
    assert llm.stats().blocks_used > 0
    del session
    gc.collect()
    assert llm.stats().blocks_used == 0


def test_requests_need_not_wait_for_idle_sessions(tiny_model_f32: Path) -> None:
    """They take all the blocks that there are; the sessions go on as if nothing had been."""
    with LLM(
        tiny_model_f32,
        deterministic=True,
        n_ctx=256,
        kv_cache_bytes=1 << 20,
        swap_bytes=1 << 19,
        n_threads=1,
    ) as llm:
        n_blocks = llm.stats().blocks_total
        sessions = [llm.session([number + 3, *PROMPT]) for number in range(n_blocks // 5 + 2)]
        spoken = [session.generate(GREEDY).token_ids for session in sessions]
        everything = llm.generate([[9, number, *PROMPT] for number in range(4)], GREEDY)
        assert all(output.finish_reason == "length" for output in everything)
        again = [session.generate(GREEDY).token_ids for session in sessions]
        assert llm.stats().swap_blocks_used <= llm.stats().swap_blocks_total
    with LLM(tiny_model_f32, n_threads=1, deterministic=True, n_ctx=256) as llm:
        for number, (first, second) in enumerate(zip(spoken, again, strict=True)):
            assert llm.generate([number + 3, *PROMPT], GREEDY)[0].token_ids == first
            assert llm.generate([number + 3, *PROMPT, *first], GREEDY)[0].token_ids == second


def test_a_stream_that_is_closed_keeps_what_was_said(llm: LLM) -> None:
    session = llm.session(PROMPT)
    pieces = session.stream(SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
    said = [token for _, piece in zip(range(3), pieces, strict=False) for token in piece.token_ids]
    pieces.close()
    assert session.token_ids[: len(PROMPT) + 3] == (*PROMPT, *said)
    rest = session.token_ids
    output = session.generate(GREEDY)
    assert output.token_ids == llm.generate(rest, GREEDY)[0].token_ids


def test_a_session_is_read_after_the_step_that_its_stream_was_closed_in(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of another thread still draws a token for the answer."""
    run, entered, go_on = llm._engine.context.run, threading.Event(), threading.Event()

    def run_slowly(*arguments: Any) -> None:
        run(*arguments)
        entered.set()
        assert go_on.wait(30)

    session = llm.session(PROMPT)
    pieces = session.stream(GREEDY)
    next(pieces)
    monkeypatch.setattr(llm._engine.context, "run", run_slowly)
    other = threading.Thread(target=llm.generate, args=("Hello", GREEDY))
    other.start()
    assert entered.wait(30)
    pieces.close()
    threading.Timer(0.2, go_on.set).start()
    seen = len(session), session.token_ids, session.text
    other.join(30)
    session.compute()
    assert (len(session), session.token_ids, session.text) == seen
    assert len(session) == len(PROMPT) + 2


@pytest.mark.parametrize("n_ctx", [256, 512])
def test_a_session_at_the_end_forks_whether_it_is_computed_or_not(tiny_model_f32: Path, n_ctx: int) -> None:
    """The session ends with the context, or with the pool of 256 tokens."""
    everything = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    with LLM(tiny_model_f32, n_ctx=n_ctx, kv_cache_bytes=1 << 18, n_threads=1) as llm:
        assert llm.stats().tokens_total == 256
        session = llm.session(PROMPT)
        session.generate(everything)
        forks = [session.fork()]
        llm.generate([[5] * 220], SamplingParams(max_tokens=30, ignore_eos=True))
        assert llm.stats().idle == 0, "its blocks were taken"
        session.compute()
        forks.append(session.fork())
        for end in (session, *forks):
            assert end.token_ids == session.token_ids
            with pytest.raises((RequestError, OutOfBlocks)):
                end.generate(GREEDY)
            end.close()


def test_one_answer_at_a_time(llm: LLM) -> None:
    session = llm.session(PROMPT)
    pieces = session.stream(GREEDY)
    next(pieces)
    for attempt in (session.fork, session.generate, session.compute, lambda: session.append([3])):
        with pytest.raises(RequestError, match="answering"):
            attempt()
    pieces.close()
    session.append([3])


def test_many_threads_with_a_session_each(llm: LLM) -> None:
    root = llm.session(PROMPT)
    sessions = [root.fork() for _ in range(6)]
    spoken: dict[int, list[tuple[int, ...]]] = {}

    def talk(number: int) -> None:
        spoken[number] = []
        for turn in range(3):
            sessions[number].append([number + 3, turn + 3])
            spoken[number].append(sessions[number].generate(GREEDY).token_ids)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        tokens = list(PROMPT)
        for turn in range(3):
            tokens += [number + 3, turn + 3]
            assert llm.generate(tokens, GREEDY)[0].token_ids == spoken[number][turn]
            tokens += spoken[number][turn]


Attempt = Callable[[LLM], object]


@pytest.mark.parametrize(
    ("attempt", "error", "says"),
    [
        (lambda llm: llm.session([3] * 600), RequestError, "n_ctx"),
        (lambda llm: llm.session([10**6]), RequestError, "does not exist"),
        (lambda llm: llm.session(3.5), RequestError, "prompt"),
        (lambda llm: llm.session("a", cache_salt=3), RequestError, "cache_salt"),
        (lambda llm: llm.session().generate(), RequestError, "no tokens"),
        (lambda llm: llm.session([3]).generate(SamplingParams(n=2)), RequestError, "n=2: a session"),
        (lambda llm: llm.session([3]).generate(SamplingParams(best_of=2)), RequestError, "best_of=2"),
        (lambda llm: llm.session([3]).generate(7), RequestError, "SamplingParams"),
        (lambda llm: llm.session([3] * 500).append([3] * 12), RequestError, "n_ctx"),
    ],
)
def test_what_is_wrong_is_said(llm: LLM, attempt: Attempt, error: type[VeloError], says: str) -> None:
    with pytest.raises(error, match=says):
        attempt(llm)
    assert llm.stats().blocks_used == 0


def test_what_is_refused_changes_nothing(tiny_model_f32: Path) -> None:
    with LLM(tiny_model_f32, n_threads=1, n_ctx=512, kv_cache_bytes=1 << 18) as llm:
        session = llm.session([3] * 40)
        with pytest.raises(OutOfBlocks):
            session.append([3] * 400)
        assert len(session) == 40
        assert len(session.generate(GREEDY).token_ids) == 20


def test_after_the_end(tiny_model_f32: Path) -> None:
    llm = LLM(tiny_model_f32, n_threads=1)
    session, other = llm.session(PROMPT), llm.session(PROMPT)
    session.generate(GREEDY)
    session.close()
    session.close()
    with pytest.raises(ClosedError, match="session"):
        session.generate()
    llm.close()
    with pytest.raises(ClosedError):
        other.generate()
    other.close()


def test_text_keeps_the_spaces_in_front_of_punctuation(make_model: MakeModel) -> None:
    """Upstream's llama_detokenize removes them for this kind of vocabulary; an answer's stream keeps them."""
    shape = ["--layers", "1", "--embd", "64", "--ffn", "64", "--heads", "1", "--kv-heads", "1"]
    path = make_model(*shape, "--vocab", "gpt-2", "--type", "f32")
    prompt = "Hello , world ! It 's ' quoted ' ?"
    params = SamplingParams(max_tokens=4, temperature=0, echo=True, logit_bias={764: 1e6})  # " ."
    with LLM(path, n_ctx=256, n_threads=1) as llm:
        tokens = llm.tokenize(prompt)
        assert llm.detokenize(tokens) == prompt
        for given_ in (prompt, tokens):
            assert llm.generate([given_], params)[0].text == prompt + " . . . ."
        session = llm.session(tokens)
        assert session.text == prompt
        assert session.generate(params).text == prompt + " . . . ."
        assert session.text == prompt + " . . . ."
        session.append(" , no")
        assert session.text == prompt + " . . . . , no"


def test_a_session_gives_its_blocks_to_a_request_that_begins_like_it(tiny_model_f32: Path) -> None:
    """In one step: the first request shares three blocks of the session, the second needs what it frees."""
    common = list(range(10, 106))
    asked = [[*common, 200], list(range(30, 210))]
    first = SamplingParams(max_tokens=1, temperature=0)
    settings = {"n_ctx": 512, "n_threads": 1, "deterministic": True}
    with LLM(tiny_model_f32, **settings) as llm:
        size = llm.stats().block_bytes
        expected = [output.token_ids for output in llm.generate(asked, first)]
    with LLM(tiny_model_f32, kv_cache_bytes=8 * size, **settings) as llm:
        with llm.session(common) as session:
            session.generate(SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
            assert [output.token_ids for output in llm.generate(asked, first)] == expected
        assert llm.stats().blocks_used == 0


def test_a_full_session_names_its_tokens_and_the_context(llm: LLM) -> None:
    with llm.session([3] * 8) as session:
        session.generate(SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))
        with pytest.raises(
            RequestError, match="the session has 512 tokens, n_ctx=512: no room for an answer"
        ):
            session.generate()
        with pytest.raises(
            RequestError, match="the session with this text has 513 tokens, n_ctx=512: no room"
        ):
            session.append([3])


def test_an_answer_cannot_have_another_salt_than_its_session(tiny_model: Path) -> None:
    params = SamplingParams(max_tokens=1)
    with LLM(tiny_model, n_ctx=256, n_threads=1) as llm, llm.session([3, 4], cache_salt="b") as session:
        assert session.generate(replace(params, cache_salt="b")).usage.completion_tokens == 1
        assert session.generate(params).usage.completion_tokens == 1
        for salt in ("a", "bb"):
            with pytest.raises(RequestError, match="cache_salt: a session keeps its own"):
                session.generate(replace(params, cache_salt=salt))
        with pytest.raises(RequestError, match="cache_salt"):
            next(session.fork().stream(replace(params, cache_salt="a")))


def test_a_text_that_is_appended_follows_the_text_before(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "tokenize_more", lambda model, text: [len(text), 7])
    session = llm.session()
    session.append("Hello")
    first = session.token_ids
    assert first == tuple(llm.tokenize("Hello"))
    session.append("world")
    assert session.token_ids == (*first, 5, 7)
