"""Grammars of rules that call each other at their ends become repetitions that match the same texts."""

from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from pyvelo.grammar.gbnf import Gbnf, Ref, Repeat, parse
from pyvelo.grammar.lark import to_lark
from pyvelo.grammar.linear import without_cycles

UNTIL = """\
root ::= "a" until "</t>"
until ::= | [<] until-1 | [^<] until
until-1 ::= | [<] until-1 | [/] until-2 | [^/<] until
until-2 ::= | [<] until-1 | [t] until-3 | [^<t] until
until-3 ::= | [<] until-1 | [^<>] until
"""


def calls(grammar: Gbnf, rule: int) -> set[int]:
    inner = [item.item if isinstance(item, Repeat) else item for part in grammar.rules[rule] for item in part]
    return {item.rule for item in inner if isinstance(item, Ref)}


def reachable(grammar: Gbnf, rule: int) -> set[int]:
    found: set[int] = set()
    todo = [rule]
    while todo:
        new = calls(grammar, todo.pop()) - found
        found |= new
        todo += new
    return found


def pattern(lark: str) -> re.Pattern[str]:
    """Return the regular expression of a Lark grammar of terminals."""
    rules = dict(line.split(": ", 1) for line in lark.splitlines()[1:])

    def expand(name: str) -> str:
        text = re.sub(r'""', "", rules[name])
        text = re.sub(r"/\[(.*?)\]/", r"[\1]", text)
        text = re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", text)
        parts = [
            re.sub(r"\bR\d+\b", lambda found: f"(?:{expand(found[0])})", part) for part in text.split(" ")
        ]
        return "".join(part if part != "|" else "|" for part in parts)

    return re.compile(expand("start"), re.DOTALL)


def test_an_automaton_becomes_regular() -> None:
    grammar = parse(UNTIL, lambda _: None)
    assert any(rule in reachable(grammar, rule) for rule in grammar.rules)
    without_cycles(grammar, list(grammar.rules))
    assert not any(rule in reachable(grammar, rule) for rule in reachable(grammar, grammar.root))
    assert "start: R0" in to_lark(UNTIL, lambda _: None)


def test_it_matches_the_same_texts() -> None:
    matches = pattern(to_lark(UNTIL, lambda _: None)).fullmatch
    for letters in itertools.product("</t>x", repeat=4):
        inner = "".join(letters)
        wanted = "</t>" not in inner
        assert (matches(f"a{inner}</t>") is not None) == wanted, inner


def test_other_recursion_stays() -> None:
    source = 'root ::= "(" inner ")" | "x"\ninner ::= root inner | "y" root | ""'
    grammar = parse(source, lambda _: None)
    before = {rule: list(parts) for rule, parts in grammar.rules.items()}
    without_cycles(grammar, list(grammar.rules))
    assert grammar.rules == before


@given(st.data())
def test_random_automata(data: st.DataObject) -> None:
    """A right-linear grammar and its translation accept the same texts of up to 4 letters."""
    n = data.draw(st.integers(2, 4))
    edges = {(state, letter): data.draw(st.integers(-1, n - 1)) for state in range(n) for letter in "ab"}
    ends = {state for state in range(n) if data.draw(st.booleans())} | {n - 1}
    lines = []
    for state in range(n):
        parts = [f'"{letter}" s{to}' for letter in "ab" if (to := edges[state, letter]) >= 0]
        parts += ['""'] if state in ends else []
        lines.append(f"s{state} ::= {' | '.join(parts) or chr(34) + 'c' + chr(34)}")
    source = "\n".join(['root ::= "c" s0', *lines])
    try:
        lark = to_lark(source, lambda _: None)
    except ValueError:
        return  # a rule that matches no text
    if "start: R0" not in lark:
        return
    matches = pattern(lark).fullmatch
    for length in range(5):
        for letters in itertools.product("ab", repeat=length):
            state = 0
            for letter in letters:
                state = edges[state, letter] if state >= 0 else -1
            dead_end = state >= 0 and not any(edges[state, one] >= 0 for one in "ab") and state not in ends
            assert (matches("c" + "".join(letters)) is not None) == (state in ends and not dead_end)
