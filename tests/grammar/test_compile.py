"""Compiled grammars are bounded, shared and cached, and a caller waits no longer than its deadline."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.errors import ClosedError, ComputeError, RequestError
from pyvelo.grammar import matcher as matcher_module
from pyvelo.grammar.limits import MAX_PROPERTIES, MAX_REMAINDERS
from pyvelo.grammar.matcher import GrammarCompiler
from pyvelo.native import Model
from pyvelo.sampling import MAX_CHARACTERS

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
    monkeypatch.setattr(matcher_module, "MAX_CACHED", 2)
    compiler = GrammarCompiler(model)
    for source in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(regex(source))
    assert slow.made == ["a", "b", "c", "b"]
    slow.made.clear()
    monkeypatch.setattr(matcher_module, "MAX_CACHED_CHARACTERS", 5)
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
    for _ in range(matcher_module.MAX_COMPILING):
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


@pytest.mark.parametrize("inside", [False, True])
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


CHILD = """
import json, sys
from pyvelo import SamplingParams
from pyvelo.errors import VeloError
from pyvelo.native import Model
from pyvelo.grammar.matcher import GrammarCompiler
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2])))
except ImportError:
    pass
compiler = GrammarCompiler(Model(sys.argv[1], vocab_only=True))
n = 0
for kind, source in json.load(sys.stdin):
    try:
        matcher = compiler.compile(SamplingParams(**{kind: source})).copy()
        for _ in range(12):
            mask = matcher.mask()
            token = next((i for i in range(len(mask) * 8) if mask[i // 8] >> i % 8 & 1), None)
            if token is None or matcher.accept(token):
                break
    except VeloError:
        pass
    n += 1
print(n)
"""


def follow(model_path: Path, cases: list[tuple[str, Any]], cpu_seconds: int) -> None:
    """Compile each, and follow it for a few tokens, in a process that may be killed."""
    command = [sys.executable, "-c", CHILD, str(model_path), str(cpu_seconds)]
    done = subprocess.run(
        command, input=json.dumps(cases), text=True, capture_output=True, timeout=580, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, [str(len(cases))]), done.stderr[-2000:]


def chain(n: int, link: Callable[[int], str], end: str) -> str:
    return "\n".join([*(link(i) for i in range(n)), end])


N = 3500
DEEP: dict[str, tuple[str, Any]] = {
    "references": ("json_schema", {
        "$defs": {**{f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(N)}, f"a{N}": {}},
        "$ref": "#/$defs/a0",
    }),
    "properties": ("json_schema", {
        "$defs": {**{f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(2000)},
                  "a2000": {}}, "$ref": "#/$defs/a0",
    }),
    "terminals": ("grammar", chain(900, lambda i: f'A{i}: (A{i + 1} "a")+ | "b"', 'A900: "b"\nstart: A0')),
    "rules": ("grammar", chain(8000, lambda i: f"a{i}: a{i + 1}", 'a8000: "b"\nstart: a0')),
    "groups": ("grammar", chain(5000, lambda i: f'a{i}: ("b"|(a{i + 1}|"c"))', 'a5000: "b"\nstart: a0')),
    "gbnf": ("grammar", chain(7000, lambda i: f"a{i} ::= a{i + 1}", 'a7000 ::= "b"\nroot ::= a0')),
    "parentheses": ("grammar", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000),
    "lark parentheses": ("grammar", "start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "repeated": ("grammar", 'root ::= "a"' + "+" * 9000),
    "regex": ("regex", "(" * 60_000 + "a" + ")" * 60_000),
}  # fmt: skip


@pytest.mark.parametrize("name", DEEP)
def test_no_depth_kills_the_process(tiny_model: Path, name: str) -> None:
    kind, source = DEEP[name]
    assert len(source if kind != "json_schema" else json.dumps(source)) <= MAX_CHARACTERS
    follow(tiny_model, [(kind, source)], 300)


def schemas() -> Iterator[Any]:
    """Return hostile grammars of each kind, alone and nested in each other."""
    words = [f"x{i}" for i in range(3000)]
    hard: list[Any] = [
        {"enum": words},
        {"anyOf": [{"const": word} for word in words]},
        {"type": "object", "properties": {word: {"type": "string"} for word in words}},
        {"type": "object", "properties": {word: {} for word in words[:500]}, "required": words[:500:2]},
        {"type": "string", "minLength": 9999, "maxLength": 10**9},
        {"type": "array", "items": {}, "minItems": 10**5, "maxItems": 10**9},
        {"type": "object", "minProperties": 500, "maxProperties": 10**6},
        {"type": "string", "pattern": "((a|aa)*){1000}"},
        {"type": "string", "pattern": "(.*a.{200}){20}"},
        {"type": "string", "pattern": "(?=a)(?!b)(?<=c)"},
        {"allOf": [{"type": "string", "pattern": f".*[a-m].{{{i}}}[n-z].*"} for i in range(9)]},
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(12)]},
        {"oneOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(300)]},
        {"type": "integer", "minimum": -(10**18), "maximum": 10**18, "multipleOf": 9973},
        {"type": "number", "exclusiveMinimum": 1e-300, "maximum": 1e300},
        {"not": {}},
        {"patternProperties": {f"^.*a.{{{i}}}b$": {} for i in range(10, 16)}},
        {"if": {}, "then": {}, "else": {}},
        {"format": "no such format", "type": "string"},
    ]  # fmt: skip
    yield from hard
    for schema in hard:
        yield {"type": "array", "items": schema}
        yield {"anyOf": [schema, {"type": "null"}, {"type": "array", "prefixItems": [schema, schema]}]}
        yield {"allOf": [{"type": ["string", "object", "array"]}, schema]}
        yield {"type": "object", "properties": {"a": schema, "b": schema}, "additionalProperties": schema}


def expressions() -> Iterator[str]:
    parts = [
        "a",
        "(a|aa)*",
        "[ab]*a[ab]{18}",
        r"\w{500}",
        ".*",
        r"\p{L}?",
        "(x+x+)+y",
        "((a{9}){9}){9}",
        "[^a]{0,999}",
    ]
    for part in parts:
        yield part
        yield f"({part}){{1000}}"
        yield f"(({part})|b)*({part})?"
        yield "|".join(f"({part})c{i}" for i in range(50))
        yield "".join(f"({part})?" for _ in range(300))


def grammars() -> Iterator[str]:
    yield 'root ::= root root | "a" | ""'
    yield 'root ::= "a"* "a"* "a"* "a"* "a"* "a"* "a"* b\nb ::= "(" b ")" | "a"*'
    yield 'root ::= x{2000}\nx ::= y{2000}\ny ::= "a"? | "(" root ")"'
    yield 'root ::= x x\nx ::= ("a" | "aa" | "aaa" | "(" root ")"){0,500}'
    yield "start: A\nA: ~(/.*a.{20}/) & ~(/.*b.{20}/) & /[ab]*/"
    yield "start: a0\n" + chain(100, lambda i: f"a{i}: a{i + 1} a{i + 1}", 'a100: "b"?')
    yield "start: A0\n" + chain(100, lambda i: f"A{i}: A{i + 1} A{i + 1}", 'A100: "b"')
    yield "root ::= a0\n" + chain(100, lambda i: f"a{i} ::= a{i + 1} a{i + 1}", 'a100 ::= "b"')
    yield "root ::= " + " | ".join(f'"x{i}" root' for i in range(5000)) + ' | "y"'
    yield "root ::= " + " | ".join(f'"x{i}"' for i in range(9_000))
    yield "start: " + " | ".join(f'"x{i}"' for i in range(9_000))
    yield "start: " + " ".join(f'"x{i}"' for i in range(9_000))
    yield "start: " + " ".join('("a" | "ab" | "b")?' for _ in range(3000))


def test_hostile_schemas_end_in_time(tiny_model: Path) -> None:
    follow(tiny_model, [("json_schema", schema) for schema in schemas()], 400)


def test_hostile_expressions_and_grammars_end_in_time(tiny_model: Path) -> None:
    cases = [("regex", source) for source in expressions()] + [("grammar", source) for source in grammars()]
    follow(tiny_model, cases, 400)
