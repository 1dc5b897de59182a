"""Compiled grammars are bounded, shared and cached, and a caller waits no longer than its deadline."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.errors import ClosedError, ComputeError, RequestError
from pyvelo.grammar import compiler as compiler_module
from pyvelo.grammar.compiler import GrammarCompiler
from pyvelo.grammar.limits import MAX_PROPERTIES, MAX_REMAINDERS
from pyvelo.native import Model

from .test_hostile import chain

WAIT = 60  # seconds until something hangs


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Iterator[Model]:
    with Model(tiny_model, vocab_only=True) as made:
        yield made


class Slow:
    """Gate before each compilation, until `go` is set; it records the grammars."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        original = GrammarCompiler._made

        def slowly(compiler: GrammarCompiler, name: str, source: str) -> Any:
            self.made.append(source)
            self.begun.release()
            assert self.go.wait(WAIT)
            return original(compiler, name, source)

        monkeypatch.setattr(GrammarCompiler, "_made", slowly)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow(monkeypatch)
    yield made
    made.go.set()


def regex(source: str) -> SamplingParams:
    return SamplingParams(regex=source)


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start a thread; return a function that waits, and returns or raises its result."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(WAIT)
        assert outcome, "it hangs"
        return outcome[0]

    return result


def test_grammars_in_turns_compile_once(model: Model, slow: Slow) -> None:
    slow.go.set()
    compiler = GrammarCompiler(model)
    first = [compiler.compile(regex(source)) for source in "abc"]
    again = [compiler.compile(regex(source)) for source in "cba"]
    assert [id(matcher) for matcher in first] == [id(matcher) for matcher in reversed(again)]
    compiler.compile(SamplingParams(grammar='root ::= "a"'))
    compiler.compile(SamplingParams(json_schema=True))
    assert slow.made == ["a", "b", "c", 'root ::= "a"', "true"]


def test_equal_ones_at_the_same_time_compile_once(model: Model, slow: Slow) -> None:
    compiler = GrammarCompiler(model)
    results = [in_thread(lambda: compiler.compile(regex("ab*"))) for _ in range(5)]
    assert slow.begun.acquire(timeout=WAIT)
    other = compiler.begin(regex("ab*"))
    slow.go.set()
    found = {id(result()) for result in results}
    assert other is not None
    assert found == {id(other.result(WAIT))}
    assert slow.made == ["ab*"]


def test_those_used_last_are_kept(model: Model, slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    slow.go.set()
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 2)
    compiler = GrammarCompiler(model)
    for source in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(regex(source))
    assert slow.made == ["a", "b", "c", "b"]
    slow.made.clear()
    monkeypatch.setattr(compiler_module, "MAX_CACHED_CHARACTERS", 5)
    for source in ("long", "x", "long", "y", "long", "x"):
        compiler.compile(regex(source))
    assert slow.made == ["long", "x", "y", "x"]
    compiler.compile(regex("longer"))
    assert not compiler._cached, "it is longer than all that may be kept"


def test_an_error_is_everyones_and_is_not_kept(model: Model, slow: Slow) -> None:
    compiler = GrammarCompiler(model)
    results = [in_thread(lambda: compiler.compile(regex("("))) for _ in range(3)]
    assert slow.begun.acquire(timeout=WAIT)
    slow.go.set()
    assert all(isinstance(result(), RequestError) for result in results)
    with pytest.raises(RequestError, match=r"^regex: "):
        compiler.compile(regex("("))
    assert not compiler._waiting


def test_a_grammar_without_waiting_callers_is_not_compiled(model: Model, slow: Slow) -> None:
    compiler = GrammarCompiler(model)
    busy = [compiler.begin(regex(source)) for source in ("a", "b")]
    for _ in busy:
        assert slow.begun.acquire(timeout=WAIT)
    late = compiler.compile(regex("c"), seconds=0.01)
    assert late is not None
    with pytest.raises(ComputeError, match="the deadline passed"):
        late.copy().mask()
    wanted = compiler.begin(regex("d"))
    slow.go.set()
    for future in (*busy, wanted):
        assert future is not None
        future.result(WAIT)
    assert sorted(slow.made) == ["a", "b", "d"]
    assert compiler.compile(regex("c")) is not late
    assert sorted(slow.made) == ["a", "b", "c", "d"]


def test_close_ends_every_wait(model: Model, slow: Slow) -> None:
    compiler = GrammarCompiler(model)
    results = [in_thread(lambda n=n: compiler.compile(regex(f"a{n}"))) for n in range(4)]  # type: ignore[misc]
    for _ in range(compiler_module.MAX_COMPILING):
        assert slow.begun.acquire(timeout=WAIT)
    compiler.close()
    assert all(isinstance(result(), ClosedError) for result in results)
    with pytest.raises(ClosedError):
        compiler.compile(regex("b"))


def test_a_deadline_includes_the_compilation(tiny_model: Path, slow: Slow) -> None:
    with LLM(tiny_model, n_threads=1) as llm:
        params = SamplingParams(regex="a+", timeout=0.05, max_tokens=5)
        output = llm.generate("Once", params)[0].outputs[0]
        assert (output.token_ids, output.text, output.error) == ((), "", None)
        assert output.finish_reason == "timeout"
        slow.go.set()
        assert llm.generate("Once", SamplingParams(regex="a{3}"))[0].text == "aaa"


def test_a_stream_whose_grammar_is_late_times_out(tiny_model: Path, slow: Slow) -> None:
    with LLM(tiny_model, n_threads=1) as llm:
        params = SamplingParams(regex="a+", timeout=0.05, max_tokens=5)
        for stream in (llm.stream("Once", params), llm.session("Once").stream(params)):
            assert [(piece.text, piece.finish_reason) for piece in stream] == [("", "timeout")]
        slow.go.set()


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("streams", [False, True])
def test_ctrl_c_ends_the_wait_of_a_session(tiny_model: Path, slow: Slow, streams: bool) -> None:
    def interrupt() -> None:
        assert slow.begun.acquire(timeout=WAIT)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        if not ended.wait(5.0):
            slow.go.set()  # or the test would hang

    ended = threading.Event()
    with LLM(tiny_model, n_threads=1) as llm, llm.session("Once") as session:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            list(session.stream(regex("a+"))) if streams else session.generate(regex("a+"))
        assert not slow.go.is_set(), "it waited for the grammar"
        ended.set()
        thread.join(WAIT)
        slow.go.set()
        assert session.generate(regex("a{3}")).text == "aaa"


def test_closing_the_engine_ends_a_compilation(tiny_model: Path, slow: Slow) -> None:
    llm = LLM(tiny_model, n_threads=1)
    result = in_thread(lambda: llm.generate("Once", regex("a+")))
    assert slow.begun.acquire(timeout=WAIT)
    llm.close()
    assert isinstance(result(), ClosedError)


# ---- limits ----

MULTIPLES: list[Any] = [
    {"multipleOf": 1000003},
    {"multipleOf": 10**9 + 7},
    {"type": "integer", "multipleOf": 200003},
    {"multipleOf": 1234.5678},
    {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]},
    {"anyOf": [{"multipleOf": n} for n in range(9900, 9910)]},
    {"properties": {"a": {"items": {"multipleOf": 1.000003}}}},
]


@pytest.mark.parametrize("schema", MULTIPLES)
def test_too_many_remainders_are_refused(model: Model, schema: Any) -> None:
    message = rf"multipleOf=.*the most is {MAX_REMAINDERS}: take smaller or rounder"
    with pytest.raises(RequestError, match=rf"json_schema: {message}"):
        GrammarCompiler(model).compile(SamplingParams(json_schema=schema))
    with pytest.raises(RequestError, match=rf"grammar: {message}"):
        GrammarCompiler(model).compile(SamplingParams(grammar=f"start: a+\na: %json {json.dumps(schema)}"))


@pytest.mark.parametrize("number", [7, 0.01, 1e6, 100000, 9973, 0.125, 60])
def test_ordinary_multiples_are_not(model: Model, number: float) -> None:
    assert GrammarCompiler(model).compile(SamplingParams(json_schema={"multipleOf": number})) is not None


@pytest.mark.parametrize("inside", [pytest.param(False, marks=pytest.mark.slow), True])
def test_as_many_optional_names_as_allowed_can_be_followed(model: Model, inside: bool) -> None:
    names = {f"x{i}": {"type": "integer"} for i in range(MAX_PROPERTIES - inside)}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    if inside:
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    matcher = GrammarCompiler(model).compile(SamplingParams(json_schema=schema))
    assert matcher is not None
    text = '{"x0": 1, "x1999": 2}' if not inside else '{"a": {"x7": 1, "x1998": 2}}'
    token_of = {model.token_bytes(token): token for token in range(model.vocab.n_tokens)}
    for character in text:
        token = token_of[character.encode()]
        assert matcher.mask()[token // 8] >> token % 8 & 1, f"{character} in {text}"
        matcher.accept(token)


def test_too_many_names_are_refused(model: Model) -> None:
    compiler = GrammarCompiler(model)
    names = {f"x{i}": True for i in range(2001)}
    with pytest.raises(RequestError, match="json_schema: 2001 names in properties, the most are 2000"):
        compiler.compile(SamplingParams(json_schema={"properties": names}))
    names = {f"^x{i}$": True for i in range(151)}
    with pytest.raises(RequestError, match="json_schema: 151 names in patternProperties, the most are 150"):
        compiler.compile(SamplingParams(json_schema={"patternProperties": names}))
    terminals = chain(1000, lambda i: f'A{i}: "a" A{i + 1}', 'A1000: "b"\nstart: A0')
    with pytest.raises(RequestError, match="grammar: 1001 terminals, the most are 1000: write some as rules"):
        compiler.compile(SamplingParams(grammar=terminals))


def text(pattern: str, **others: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, **others}


CROSSED: dict[str, Any] = {
    "all": {"allOf": [text(f".*{i}.{{9}}[a-c]") for i in range(60)]},
    "references": {"$defs": {f"d{i}": text(f".*{i}x", **{"$ref": f"#/$defs/d{i + 1}"}) for i in range(60)},
                   "$ref": "#/$defs/d0"},
    "properties": {"allOf": [{"properties": {"a": text(f".*{i}.{{9}}")}} for i in range(60)]},
    "itself": {"$defs": {"d": text("a+b", **{"$ref": "#/$defs/d"})}, "$ref": "#/$defs/d"},
}  # fmt: skip


@pytest.mark.parametrize("name", CROSSED)
def test_patterns_that_meet_in_one_string_are_few(model: Model, name: str) -> None:
    with pytest.raises(RequestError, match="more than 12 patterns and formats may meet in one string"):
        GrammarCompiler(model).compile(SamplingParams(json_schema=CROSSED[name]))


def test_patterns_apart_may_be_many(model: Model) -> None:
    node = {"properties": {f"p{i}": text(f"{i}+") for i in range(60)} | {"next": {"$ref": "#/$defs/node"}}}
    schema = {"$defs": {"node": node}, "anyOf": [{"$ref": "#/$defs/node"}, {"items": text("a+")}]}
    assert GrammarCompiler(model).compile(SamplingParams(json_schema=schema)) is not None
    nested: dict[str, Any] = {}
    for _ in range(300):
        nested = {"anyOf": [nested]}
    with pytest.raises(RequestError, match="json_schema: it is nested more than 120 deep"):
        GrammarCompiler(model).compile(SamplingParams(json_schema=nested))


def test_too_long_is_refused() -> None:
    alternatives = [f'"x{n}"' for n in range(50_000)]
    sources: dict[str, list[Any]] = {
        "grammar": ["start: " + " | ".join(alternatives), "root ::= " + " | ".join(alternatives)],
        "regex": ["|".join(alternatives), "a" * (1 << 20)],
        "json_schema": [{"enum": alternatives}],
    }
    for name in sources:
        for source in sources[name]:
            with pytest.raises(RequestError, match=rf"{name} has \d+ characters: give up to 131072$"):
                SamplingParams(**{name: source})


@pytest.mark.parametrize("source", ["a{1000000}", "x (a{1000}){1000}"])
def test_a_regex_with_too_many_repetitions_is_refused(model: Model, source: str) -> None:
    with pytest.raises(RequestError, match=r"regex: no output can follow it: .*too many"):
        GrammarCompiler(model).compile(regex(source))


def test_a_regex_that_ends_with_a_backslash_is_refused(model: Model) -> None:
    compiler = GrammarCompiler(model)
    for source in ("\\", "ab\\", "ab\\\\\\"):
        with pytest.raises(RequestError, match="backslash that escapes nothing"):
            compiler.compile(regex(source))
    assert compiler.compile(regex("ab\\\\")) is not None
