"""Random schemas of hostile parts compile and are followed for some tokens, or are refused, in time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from .test_hostile import follow

PATTERNS = [
    "a+", "(a|aa)*b", "[ab]*a[ab]{18}", r"\w{500}", "^.*x.*$", "(?=a)b", "((a{9}){9}){9}", r"\d{3}-\d{4}",
    ".{0,300}", "(x+x+)+y",
]  # fmt: skip
FORMATS = ["date-time", "uri", "ipv6", "email", "uuid", "no such format"]


def leaf(draws: random.Random) -> Any:
    numbers = [draws.randint(0, 10**6) for _ in range(draws.randint(1, 50))]
    return draws.choice([
        {}, True, False, {"type": "string", "maxLength": numbers[0]}, {"enum": numbers},
        {"const": draws.choice([1, "x", None, [1, 2], {"a": 1}])},
        {"multipleOf": draws.choice([3, 0.1, 17, 9973, 250, 10**9 + 7])},
        {"type": "integer", "minimum": -(10 ** draws.randint(1, 18))},
        {"type": "number", "maximum": draws.random() * 10 ** draws.randint(-5, 20)},
        {"type": "string", "format": draws.choice(FORMATS)},
        {"type": "string", "pattern": draws.choice(PATTERNS)},
    ])  # fmt: skip


def schema(draws: random.Random, depth: int, names: list[str]) -> Any:
    kind = draws.choice(["leaf", "some", "object", "array", "reference", "patterns"]) if depth else "leaf"

    def inner() -> Any:
        return schema(draws, depth - 1, names)

    if kind == "some":
        return {draws.choice(["anyOf", "oneOf", "allOf"]): [inner() for _ in range(draws.randint(1, 8))]}
    if kind == "object":
        properties = {f"p{i}": inner() for i in range(draws.randint(0, 12))}
        required = [f"p{i}" for i in range(draws.randint(0, 6))]
        return {"properties": properties, "required": required, "additionalProperties": inner()}
    if kind == "array":
        items = {"prefixItems": [inner() for _ in range(draws.randint(0, 30))], "items": inner()}
        return items | {"minItems": draws.choice([0, 10, 10**4]), "maxItems": draws.choice([3, 10**7])}
    if kind == "reference" and names:
        pattern = {"pattern": draws.choice(PATTERNS)} if draws.random() < 0.3 else {}
        return {"$ref": f"#/$defs/{draws.choice(names)}"} | pattern
    if kind == "patterns":
        return {"patternProperties": {name: inner() for name in draws.sample(PATTERNS, draws.randint(1, 4))}}
    return leaf(draws)


def whole(draws: random.Random) -> Any:
    names = [f"d{i}" for i in range(draws.randint(0, 6))]
    return {"anyOf": [schema(draws, 4, names)], "$defs": {name: schema(draws, 3, names) for name in names}}


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 200), marks=pytest.mark.slow)])
def test_random_hostile_schemas_end_in_time(tiny_model: Path, seeds: range) -> None:
    follow(tiny_model, [("json_schema", whole(random.Random(seed))) for seed in seeds], 300)
