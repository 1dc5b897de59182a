"""Random templates of all that the syntax has, rendered within limits of CPU time and memory.

    python -m tests.chat.random_templates NUMBER SEED

renders NUMBER templates. The process is killed in the middle of one that takes too long; the last line of
its output is the template.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

from pyvelo.chat.meter import Limits
from pyvelo.chat.sandbox import METHODS as VALUE_METHODS
from pyvelo.chat.sandbox_costs import METHODS
from pyvelo.chat.sandbox_functions import FILTERS, TESTS
from pyvelo.chat.sandbox_text import TEXT_METHODS
from pyvelo.chat.template import ChatTemplate
from pyvelo.errors import TemplateError

from .operations import MEMORY, SECONDS, allow_memory, allow_seconds

LIMITS = Limits(max_output=1 << 20, max_work=1 << 18, work_per_input=1, seconds=2.0)
MESSAGES = [
    {"role": "user", "content": "Hi <|end|> " * 500, "k<|end|>": {"a": [1, 2.5, None], "b": "x"}, "n": -3},
    {"role": "assistant", "content": "a\tb\nc" * 500, "n": 3},
]
ATOMS = {
    "number": (
        "0",
        "1",
        "-1",
        "2",
        "7",
        "64",
        "i",
        "loop.index",
        "m.n",
        "3.5",
        "true",
        "10**18",
        "-(10**18)",
        "99999",
    ),
    "text": (
        "''",
        "'a'",
        "' '",
        "'%s'",
        "'{0:>9}'",
        "'ab' * 999",
        "'\\n'",
        "m.content",
        "m.role",
        "s",
        "'<' ~ s",
    ),
    "list": (
        "[]",
        "[1, 2]",
        "messages",
        "range(9) | list",
        "range(99999) | list",
        "l",
        "m.keys() | list",
        "s | list",
        "'a b c'.split()",
    ),
    "dictionary": ("{}", "m", "d", "{'a': [1], 'b': 2}", "{s: l}", "dict(m)"),
}
KINDS = tuple(ATOMS)
TO_TEXT = (
    "capitalize",
    "e",
    "indent",
    "lower",
    "string",
    "title",
    "tojson",
    "trim",
    "upper",
    "join",
    "center",
)
TO_LIST = (
    "list",
    "sort",
    "unique",
    "batch(3)",
    "slice(4)",
    "map('string') | list",
    "reverse | list",
    "items",
)
TO_LIST += ("select | list", "dictsort", "map('upper') | list", "groupby(0)", "select('in', l) | list")
METHOD_NAMES = sorted({*TEXT_METHODS, *(name for table in VALUE_METHODS.values() for name in table)})
FILTER_NAMES = sorted(name for name in FILTERS if not name.startswith(" "))
TEST_NAMES = sorted(filter(str.isalpha, TESTS))
BINARY = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">=", "in", "not in", "and", "or")


def expression(rng: random.Random, kind: str, depth: int) -> str:
    """Return an expression that mostly is of a kind; the deeper it stands, the simpler it is."""

    def a(kind: str) -> str:
        return "(" + expression(rng, kind, depth + 1) + ")"

    def some() -> str:
        return ", ".join(a(rng.choice(KINDS)) for _ in range(rng.choice((0, 1, 1, 2))))

    if rng.random() < 0.05:  # of any kind
        return rng.choice(
            (
                f"{a(rng.choice(KINDS))}.{rng.choice(METHOD_NAMES)}({some()})",
                f"{a(rng.choice(KINDS))} | {rng.choice(FILTER_NAMES)}({some()})",
                f"{a(rng.choice(KINDS))} is {rng.choice(TEST_NAMES)}",
                f"{a(rng.choice(KINDS))} {rng.choice(BINARY)} {a(rng.choice(KINDS))}",
                f"{a(rng.choice(KINDS))}[{a(rng.choice(KINDS))}]",
                f"[{a(rng.choice(KINDS))}, {a(rng.choice(KINDS))}]",
            )
        )
    if depth > 3 or rng.random() < 0.2:
        return rng.choice(ATOMS[kind])
    number, text, items = a("number"), a("text"), a("list")
    made = {
        "number": (
            *(f"{number} {rng.choice('+-*')} {a('number')}", f"{text} | length", f"{items} | length"),
            *(f"{text}.{rng.choice(('find', 'count', 'rfind'))}({a('text')})", f"{number} | abs | int"),
        ),
        "text": (
            *(f"{text} ~ {a('text')}", f"{text} * {number}", f"{text}[{number}:]", f"{text}[::-1]"),
            *(f"{text} | {rng.choice(TO_TEXT)}", f"{items} | {rng.choice(('join', 'tojson', 'string'))}"),
            *(f"{text}.{_call(rng, a)}", f"{text} | replace({a('text')}, {a('text')})", f"f({a('list')})"),
            *(
                f"'{{}} {{}}'.format({text}, {number})",
                f"'%s %s' % ({text}, {items})",
                f"{text}.join({text})",
            ),
        ),
        "list": (
            *(f"{items} + {a('list')}", f"{items} * {number}", f"{items}[{number}:]", f"{text}.splitlines()"),
            *(f"{text}.split({a('text')})", f"{text}.split()", f"{items} | {rng.choice(TO_LIST)}"),
            *(f"{a('dictionary')}.items() | list", f"[{items}, {items}]", f"range({number})"),
        ),
        "dictionary": (f"dict({a('dictionary')})", f"{{{text}: {items}}}", f"{a('dictionary')}.copy()"),
    }
    return rng.choice(made[kind])


def _call(rng: random.Random, a: Callable[[str], str]) -> str:
    """Return a method of strings with arguments that fit, some of them by name."""
    name = rng.choice(sorted(METHODS))
    given = []
    for item in [*METHODS[name].signature.parameters.values()][1:]:
        if item.default is item.empty or rng.random() < 0.5:
            value = a("text" if "str" in str(item.annotation) else "number")
            given.append(value if item.default is item.empty else f"{item.name}={value}")
    return f"{name}({', '.join(given)}) | string"


def statement(rng: random.Random, depth: int) -> str:
    """Return a statement with what is in its body."""
    kind = rng.choice(KINDS)
    value = expression(rng, kind, 1)
    if depth > 2:
        return "{{ " + value + " }}"
    body = "".join(statement(rng, depth + 1) for _ in range(rng.choice((1, 1, 2))))
    name = {"number": "i", "text": "s", "list": "l", "dictionary": "d"}[kind]
    return rng.choice(
        (
            *("{{ " + value + " }}", "{% set " + name + " = " + value + " %}", body),
            "{% for v in " + value + " %}" + body + "{% endfor %}" if kind != "number" else body,
            "{% for m in messages %}" + body + "{% endfor %}",
            "{% for i in range(99999) if " + value + " %}" + body + "{% else %}x{% endfor %}",
            "{% for v in [[l]] recursive %}{{ loop(v) if v is iterable }}" + body + "{% endfor %}",
            "{% if " + value + " %}" + body + "{% else %}{{ " + name + " }}{% endif %}",
            "{% set s %}" + body + "{% endset %}",
            "{% macro g(a, b=" + value + ") %}" + body + "{{ caller() if caller }}{% endmacro %}{{ g(1) }}",
            "{% call f(" + value + ") %}" + body + "{% endcall %}",
            "{% filter " + rng.choice(TO_TEXT) + " %}" + body + "{% endfilter %}",
            "{% with " + name + " = " + value + " %}" + body + "{% endwith %}",
        )
    )


def template(seed: int) -> str:
    """Return the template of a seed."""
    rng = random.Random(seed)
    head = "{% set i = 3 %}{% set s = 'a b' * 99 %}{% set d = {'a': [1]} %}{% set l = [2, 'x'] %}"
    head += "{% macro f(x=1) %}{{ x }}{{ varargs | length }}{{ caller() if caller }}{% endmacro %}"
    head += "{% set m = messages[0] %}"
    return head + "".join(statement(rng, 0) for _ in range(2))


def main(number: int, seed: int) -> None:
    """Render the templates of so many seeds; whatever is raised must be a TemplateError."""
    if sys.platform == "linux":
        allow_memory(MEMORY)
    refused = limited = 0
    for each in range(seed, seed + number):
        source = template(each)
        print(each, repr(source), flush=True)
        allow_seconds(SECONDS)
        try:
            ChatTemplate(source, limits=LIMITS).render(MESSAGES)
        except TemplateError as error:
            refused += 1
            limited += "more work" in str(error) or "longer" in str(error)
            if "more memory" in str(error):
                raise SystemExit(str(error)) from None
    print(f"done: of {number} templates {number - refused} were rendered, {limited} stopped by a limit")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
