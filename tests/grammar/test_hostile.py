"""Deep and hostile grammars compile and are followed for some tokens, or are refused, in time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyvelo.sampling import MAX_CHARACTERS


def chain(n: int, link: Callable[[int], str], end: str) -> str:
    return "\n".join([*(link(i) for i in range(n)), end])


CHILD = """
import json, sys
from pyvelo import SamplingParams
from pyvelo.errors import VeloError
from pyvelo.native import Model
from pyvelo.grammar.compiler import GrammarCompiler
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2])))
except ImportError:
    pass
compiler = GrammarCompiler(Model(sys.argv[1], vocab_only=True))
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
    print("followed", flush=True)
"""


def follow(model_path: Path, cases: list[tuple[str, Any]], cpu_seconds: int) -> None:
    """Compile each, and follow it for a few tokens, in a process that may be killed."""
    command = [sys.executable, "-c", CHILD, str(model_path), str(cpu_seconds)]
    done = subprocess.run(
        command, input=json.dumps(cases), text=True, capture_output=True, timeout=580, check=False
    )
    n_followed = done.stdout.count("followed")
    assert n_followed == len(cases), (
        f"{str(cases[n_followed])[:200]}: {done.returncode}, {done.stderr[-2000:]}"
    )
    assert done.returncode == 0, done.stderr[-2000:]


def groups(n: int) -> tuple[str, str]:
    return "grammar", chain(n, lambda i: f'a{i}: ("b"|(a{i + 1}|"c"))', f'a{n}: "b"\nstart: a0')


def repeated(n: int) -> tuple[str, str]:
    return "grammar", 'root ::= "a"' + "+" * n


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
    "groups": groups(2500),
    "gbnf": ("grammar", chain(7000, lambda i: f"a{i} ::= a{i + 1}", 'a7000 ::= "b"\nroot ::= a0')),
    "parentheses": ("grammar", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000),
    "lark parentheses": ("grammar", "start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "repeated": repeated(3000),
    "regex": ("regex", "(" * 60_000 + "a" + ")" * 60_000),
}  # fmt: skip


DEEPEST = [groups(5000), repeated(9000)]  # their time is quadratic; the first needs the largest stack


@pytest.mark.parametrize(
    "cases", [[*DEEP.values()], pytest.param(DEEPEST, marks=pytest.mark.slow)], ids=["deep", "deepest"]
)
def test_no_depth_kills_the_process(tiny_model: Path, cases: list[tuple[str, Any]]) -> None:
    for kind, source in cases:
        assert len(source if kind != "json_schema" else json.dumps(source)) <= MAX_CHARACTERS
    follow(tiny_model, cases, 300)


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
    yield "root ::= " + " | ".join(f'"x{i}" root' for i in range(2000)) + ' | "y"'
    yield "root ::= " + " | ".join(f'"x{i}"' for i in range(4_000))
    yield "start: " + " | ".join(f'"x{i}"' for i in range(9_000))
    yield "start: " + " ".join(f'"x{i}"' for i in range(9_000))
    yield "start: " + " ".join('("a" | "ab" | "b")?' for _ in range(1500))


def test_hostile_grammars_of_each_kind_end_in_time(tiny_model: Path) -> None:
    cases: list[tuple[str, Any]] = [("json_schema", schema) for schema in schemas()]
    cases += [("regex", source) for source in expressions()]
    follow(tiny_model, cases + [("grammar", source) for source in grammars()], 600)
