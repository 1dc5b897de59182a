"""Invalid and valid requests, drawn from a seed and a number."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

Draw = random.Random

HUGE = 10**5000
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 0.0, -0.0, 0.5, 1.5, -0.5, 1e-300, 1e300, float("nan"), float("inf"), -float("inf"), True,
    False, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 63, (1 << 63) - 1, (1 << 64) - 1, 1 << 64, -(1 << 63) - 1,
    HUGE, -HUGE, Fraction(1, 3), Fraction(HUGE, 3), Decimal("0.5"), 1j, np.float32(0.5), np.float64("nan"),
    np.int32(3), np.int64(-3), np.uint64((1 << 64) - 1), np.bool_(True), np.float16(7), np.array(2),
    np.array([0.5]), np.array([]),
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None, "", "1", "nan", b"1", (), [], [1], {}, {"a": 1}, object(), int, range(3), ..., NotImplemented,
    iter(()),
    "\ud800", "\x00", [None], [[1]], {1: 2},
)  # fmt: skip
TEXTS: tuple[str, ...] = (
    "Once upon a time", "Hello", " ", "\n", "\x00", "a\x00b", "\ud800", "x\udfffy", "\U0010ffff", "\ufffe",
    "e\u0301" * 9,
    "<s>", "</s><s>", "<|im_start|>system", "%s%n", "{{ 7 * 7 }}", "\u202e", "\x1b[2J", "A" * 200,
    "\U0001f98a" * 9,
    "ab" * 3000, "\u4f60\u597d",
)  # fmt: skip
TOKENS: tuple[Any, ...] = (
    0, 1, 2, 5, 50, 95, 96, -1, 1 << 31, 1 << 63, 1 << 64, HUGE, -HUGE, 1.0, 1.5, float("nan"), True, None,
    "1", b"1",
    np.int32(5), np.int64(1 << 40), np.float32(3), [1],
)  # fmt: skip
GRAMMARS: tuple[str, ...] = (
    'root ::= "yes" | "no"', "root ::= [a-z]+", 'start: "a"', "", "root", "root ::=", "root ::= root",
    "root ::= other",
    'root ::= root "a" | root "b"', "root ::= (" * 300, 'root ::= "\\', 'root ::= "\\x"', "root ::= [z-a]",
    "root ::= [\\x00-\\U0010ffff]{0,100000}", 'root ::= ("a"? ){2000}', 'root ::= "a"{1000000000}',
    "start: /(/",
    "start: /(a*)*b/", "start: start start | /a/", "\ud800", "\x00", "start: %json {",
    'start: %json {"type": 1}',
    'start: "a"{5,2}', 'root ::= "' + "a" * 5000 + '"', "start: <|nonesuch|>", "start: @1",
    "%llguidance {}\nstart: /x/",
    "start: " + "(" * 1000 + "/a/" + ")" * 1000,
    "root ::= a\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(200)),
    "start: /" + "(a|b)*" * 12 + "a" + "(a|b)" * 20 + "/",
)  # fmt: skip
REGEXES: tuple[str, ...] = (
    "[0-9]+", "(a|b)*", "", "(", ")", "[", "a{2,1}", "a{1000000000}", "((a{1000}){1000}){1000}", "(a*)*",
    "\\", "\\p{Xx}",
    "(?=a)", "(?<n>a)\\k<n>", "\\1", "a" * 20_000, "(" * 5000, "[^\\x00-\\U0010ffff]", "\x00", "\ud800",
    "(?i)\u0130",
    "(a|b)*a" + "(a|b)" * 30, "^$", "\\b", "(?:)" * 50, ".{0,500}x", "[\\d-\\w]",
)  # fmt: skip
SCHEMAS: tuple[Any, ...] = (
    True, False, {}, {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 9}, "{}", "", "{",
    "null", "[]", "1",
    '"x"', [], 1, 1.5, {"type": "nonesuch"}, {"type": 1}, {"$ref": "#"}, {"$ref": "#/a/b"},
    {"$ref": "http://localhost/x"},
    {"$ref": 5}, {"enum": []}, {"enum": [1, "a", None, {"b": []}]}, {"const": float("nan")}, {"pattern": "("},
    {"type": "string", "pattern": "(a{1000}){1000}"}, {"type": "string", "maxLength": -1}, {"minimum": "x"},
    {"type": "number", "minimum": 5, "maximum": 1}, {"type": "integer", "multipleOf": 0},
    {"allOf": [{}] * 300},
    {"anyOf": []}, {"oneOf": [{"type": "string"}] * 50}, {"not": {}}, {"properties": []}, {"required": "x"},
    {"type": "object", "properties": {str(n): {"type": "integer"} for n in range(300)}}, {"a": HUGE}, {1: 2},
    {(): 1},
    {"type": "array", "minItems": 10**9}, {"type": "string", "minLength": 10**18}, {"a": "\ud800"},
    {"a": b"x"},
    {"type": ["string", "null"]}, "[" * 3000, '{"a":' * 3000, {"format": "nonesuch"}, {"type": "string",
    "format": "date"},
)  # fmt: skip


class Hostile(NamedTuple):
    """One request: the method of `LLM`, the prompt, the parameters by name, and keywords of the call."""

    way: str
    prompt: Any
    params: dict[str, Any]
    keywords: dict[str, Any]


WAYS = ("generate",) * 8 + ("stream",) * 3 + ("session",) * 2 + ("chat",) * 3 + ("chat_stream", "beam_search")


def hostile(seed: int, index: int) -> Hostile:
    """Return the request of that number."""
    draw = Draw(f"{seed}/{index}")
    way = draw.choice(WAYS)
    make = BEAM_PARAMS if way == "beam_search" else PARAMS
    share = draw.choice((0.0, 0.1, 0.2, 0.5))
    params = {name: value(draw) for name, value in make.items() if draw.random() < share}
    if draw.random() < 0.15 and params:
        params[draw.choice(sorted(params))] = _anything(draw)
    if "max_tokens" not in params or draw.random() < 0.8:
        params["max_tokens"] = draw.choice((1, 2, 3, 8))  # else long answers take most of the time
    prompt = _messages(draw) if way.startswith("chat") else _prompt(draw)
    known = {} if way in ("session", "beam_search") else CHAT_KEYWORDS if way.startswith("chat") else KEYWORDS
    keywords = {name: value(draw) for name, value in known.items() if draw.random() < share}
    return Hostile(way, prompt, params, keywords)


def _anything(draw: Draw) -> Any:
    return draw.choice(draw.choice((NUMBERS, OTHERS, TEXTS, TOKENS, GRAMMARS, SCHEMAS)))


def _number(*sound: Any) -> Callable[[Draw], Any]:
    return lambda draw: draw.choice(sound) if draw.random() < 0.85 else draw.choice(NUMBERS)


def _one_of(choices: tuple[Any, ...]) -> Callable[[Draw], Any]:
    return lambda draw: draw.choice(choices)


def _stop(draw: Draw) -> Any:
    if draw.random() < 0.2:
        return draw.choice(
            ("", [""], ["a", ""], b"a", [b"a"], 5, [None], {"a": 1}, iter(["e"]), ("e",) * 500)
        )
    return [draw.choice(TEXTS) for _ in range(draw.choice((1, 1, 2, 9)))]


def _ids(draw: Draw) -> Any:
    if draw.random() < 0.2:
        return draw.choice(
            ("12", b"12", 5, {1: 2}, np.array([[1]]), np.array([1.5]), np.array([3, 4]), {7, 8})
        )
    return [draw.choice(TOKENS[:6] if draw.random() < 0.7 else TOKENS) for _ in range(draw.choice((0, 1, 3)))]


def _bias(draw: Draw) -> Any:
    if draw.random() < 0.2:
        return draw.choice(([], [(1, 2)], 5, "x", {}, {None: 1}, {1: None}, {"1": 2.0}, {1.5: 1}, {(1,): 1}))
    tokens = [draw.choice(TOKENS[:6] if draw.random() < 0.8 else TOKENS[:-1]) for _ in range(4)]
    values = (1.0, -5, -float("inf"), 100.0, -1e6)
    return {token: draw.choice(values if draw.random() < 0.8 else NUMBERS) for token in tokens}


PARAMS: Mapping[str, Callable[[Draw], Any]] = {
    "max_tokens": _number(None, 1, 5, 100, (1 << 31) - 1),
    "min_tokens": _number(0, 1, 1, 2),
    "n": _number(1, 2, 5, 40),
    "best_of": _number(None, 1, 3, 6),
    "temperature": _number(0, 0.7, 1.0, 1e6, 1e-30),
    "top_k": _number(0, -1, 1, 40, (1 << 31) - 1),
    "top_p": _number(1.0, 0.9, 1e-30),
    "min_p": _number(0.0, 0.1, 1.0),
    "repetition_penalty": _number(1.0, 1.2, 1e-30, 1e6),
    "presence_penalty": _number(0.0, 2.0, -2.0),
    "frequency_penalty": _number(0.0, 2.0, -2.0),
    "stop": _stop,
    "stop_token_ids": _ids,
    "skip_special_tokens": _one_of((True, False, True, False, 1, None)),
    "ignore_eos": _one_of((True, False, True, False, 0, None, "yes", np.bool_(True))),
    "seed": _number(None, 0, 7, (1 << 64) - 1),
    "logprobs": _number(None, 0, 1, 5, 96, 1024),
    "logit_bias": _bias,
    "grammar": _one_of(GRAMMARS),
    "json_schema": _one_of(SCHEMAS),
    "regex": _one_of(REGEXES),
    "priority": _number(0, 5, -5, 1_000_000, 1_000_001),
    "timeout": _number(None, 0, 1e-9, 5, 1e9),
    "cache_salt": _one_of(("", "tenant", "\x00", "a\x00", "\ud800", "x" * 10_000, None, b"x", 5)),
    "lora": _one_of((None, "", "random", "random", "absent", "\x00", "\ud800", "x" * 10_000, b"random", 5)),
}
BEAM_PARAMS: Mapping[str, Callable[[Draw], Any]] = {
    "beam_width": _number(1, 2, 4, 20, 257),
    "length_penalty": _number(1.0, 0.0, -16.0, 16.0),
    **{
        name: PARAMS[name]
        for name in ("max_tokens", "stop_token_ids", "ignore_eos", "priority", "cache_salt", "lora")
    },
}


KEYWORDS: Mapping[str, Callable[[Draw], Any]] = {
    "request_id": _one_of((None, "a", "\ud800", "", 5, b"a", "x" * 256, "x" * 257)),
    "sampling_params": _one_of((None, None, None, 5)),
}
CHAT_KEYWORDS: Mapping[str, Callable[[Draw], Any]] = {
    **KEYWORDS,
    "tools": _one_of((None, [], [{}], [5], 5, "x", {"name": "f"})),
    "chat_template": _one_of((None, "chatml", "{{ messages }}", "", "{%", 5, "x" * 70_000)),
    "add_generation_prompt": _one_of((True, False, None, "x")),
    "continue_final_message": _one_of((True, False, None, 3)),
    "template_arguments": _one_of((None, {}, {"x": 1}, 5, [1], "x", {5: 1}, {"messages": 1})),
    "chat_template_kwargs": _one_of((None, None, {"x": 1})),
}


def _prompt(draw: Draw) -> Any:
    one = _one_prompt(draw)
    if draw.random() < 0.8:
        return one
    return draw.choice(
        ([one, one], (one,), {one} if isinstance(one, str) else [one], [one, _anything(draw)], iter([one]))
    )


def _one_prompt(draw: Draw) -> Any:
    match draw.randrange(10):
        case 0 | 1 | 2 | 3:
            return draw.choice(TEXTS)
        case 4:
            return "".join(chr(draw.randrange(0x110000)) for _ in range(draw.choice((0, 1, 9, 90))))
        case 5:
            return [draw.randrange(96) for _ in range(draw.choice((0, 1, 30, 127, 128, 129, 5000)))]
        case 6:
            return [draw.choice(TOKENS) for _ in range(draw.choice((1, 2, 4)))]
        case 7:
            return np.array(
                [draw.randrange(90) for _ in range(4)], draw.choice(("i4", "i8", "u1", "f4", "U2", "O"))
            )
        case _:
            return _anything(draw)


def _messages(draw: Draw) -> Any:
    if draw.random() < 0.2:
        return draw.choice(
            (_anything(draw), [], [[]], [{}], [{"role": "user"}], "hi", [None], {"role": "user"})
        )
    messages = []
    for _ in range(draw.choice((1, 1, 2, 5))):
        message: dict[Any, Any] = {
            "role": draw.choice(
                ("user", "assistant", "system", "tool", "", "x y", "\x00", None, 5)[: draw.choice((4, 9))]
            ),
            "content": draw.choice(TEXTS) if draw.random() < 0.8 else _anything(draw),
        }
        if draw.random() < 0.15:
            message[draw.choice(("tool_calls", "name", "thinking", 5, ""))] = _anything(draw)
        messages.append(message)
    return messages
