"""Errors in GBNF are refused with line, column and the expected text; hostile grammars are read in time."""

from __future__ import annotations

import pytest

from pyvelo.grammar.gbnf import Chars, GbnfError, Ref, Repeat, parse
from pyvelo.grammar.lark import to_lark


def lark(source: str) -> str:
    return to_lark(source, {"<[7]>": 7, "<end>": 2}.get, banned=(2,))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "line 1, column 1: no rule is named root.*there are: none"),
        ('a ::= "x"\nb-1 ::= "y"', "no rule is named root.*there are: a, b-1"),
        ("root ::= a\na ::= b", "line 2, column 7: the rule b is not defined"),
        ("\n root = 'a'", "line 2, column 7: expected ::= after root, found '='"),
        ('root ::= "a"\n  | "b"', r"line 2, column 3: expected the name of a rule, found '\|'"),
        ('root ::= "a" }', "line 1, column 14: expected a new line or the end after a rule, found '}'"),
        ('root ::= "a" )', "line 1, column 14: expected a new line"),
        ('root ::= ("a"\n"b"\n', "line 1, column 10: this group is never closed"),
        ('root ::= ("a" ]', r"line 1, column 15: expected an item, \| or \), found '\]'"),
        ('root ::= "ab\n', 'line 1, column 10: this is never closed: expected "'),
        ("root ::= [ab", "line 1, column 10: this is never closed: expected ]"),
        ("root ::= [ab-", "line 1, column 10: this is never closed"),
        ('root ::=\n  "a\\', "line 2, column 5: unknown escape"),
        (r'root ::= "a\q"', r"line 1, column 12: unknown escape '\\\\q'"),
        (r"root ::= [\u00g0]", r"column 11: expected 4 hexadecimal digits after \\u"),
        (r'root ::= "\x', "column 11: expected 2 hexadecimal digits"),
        ("root ::= []", "line 1, column 10: this class is empty"),
        ("root ::= [^]", "line 1, column 10: this class is empty"),
        ("root ::= [a-cz-x]", "line 1, column 14: the range z-x ends before it begins"),
        (r'root ::= "a\x00"', "line 1, column 12: this matches no character"),
        (r"root ::= [\uD800-\uDFFF]", "line 1, column 10: this matches no character"),
        (r"root ::= [\U00110000-\UFFFFFFFF]", "matches no character"),
        (r"root ::= [^\x00-\U0010FFFF]", "matches no character"),
        ('root ::= "\ud800"', "matches no character"),
        ("root ::= *", r"line 1, column 10: expected something to repeat before \*"),
        ('root ::= "a" | +', "line 1, column 16: expected something to repeat"),
        ('root ::= ""?', "expected something to repeat"),
        ('root ::= "a"{', "line 1, column 14: expected a count, found the end"),
        ('root ::= "a"{-1}', "line 1, column 14: expected a count, found '-'"),
        ('root ::= "a"{1', "line 1, column 15: expected a count, a comma or }, found the end"),
        ('root ::= "a"{1,2', "expected a count, a comma or }"),
        ('root ::= "a"{3,2}', r"line 1, column 14: \{3,2\}: the maximum is below the minimum"),
        ('root ::= "a"{2001,}', "line 1, column 14: 2001 repetitions: the most are 2000"),
        ('root ::= "a"{99999999999999999999}', "repetitions: the most are 2000"),
        ("root ::= <missing>", "line 1, column 10: the vocabulary has no token <missing>"),
        ("root ::= !<[8]>", r"line 1, column 10: the vocabulary has no token <\[8\]>"),
        ("root ::= <[7", "line 1, column 10: expected a token"),
        ('root ::= !"a"', "line 1, column 10: expected a token"),
        ('root ::= root "x"', "the rule root matches no text: each of its alternatives begins with itself"),
        ('root ::= "x" a\na ::= ws b\nb ::= a\nws ::= ""', "the rule [ab] matches no text"),
        ('root ::= "x" (a)\na ::= (a)', "matches no text"),
    ],
)
def test_it_says_where_and_what(source: str, message: str) -> None:
    with pytest.raises(GbnfError, match=message):
        lark(source)


def test_signs_that_mean_something_to_lark_are_written_as_code_points() -> None:
    text = lark(r'root ::= "/\\\"" [/\]~&^-] ')
    assert text.splitlines()[1:] == [
        "start: R0",
        r"R0: /[\x{2f}]/ /[\x{5c}]/ /[\x{22}]/ /[\x{26}\x{2d}\x{2f}\x{5d}-\x{5e}\x{7e}]/",
    ]


def test_a_class_has_no_surrogates_and_no_zero() -> None:
    grammar = parse(r'root ::= [^a] [\x00-\x1f] "x"{0}', lambda name: None)
    assert grammar.rules[grammar.root] == [
        (Chars(((1, 0x60), (0x62, 0xD7FF), (0xE000, 0x10FFFF))), Chars(((1, 0x1F),)))
    ]


def test_a_negated_token_is_none_that_ends_the_answer() -> None:
    assert r"r0: <[^2,7]> <[7]>" in lark("root ::= !<[7]> <[7]>")


def test_counts_bind_to_what_is_before_them() -> None:
    grammar = parse('root ::= "ab" {2} [c]*+ ("d"){1 , }', lambda name: None)
    ((first, second, third),) = grammar.rules[grammar.root]
    assert isinstance(first, Repeat)
    assert isinstance(second, Repeat)
    assert (first.low, first.high, first.item) == (2, 2, Ref(1))
    assert grammar.rules[1] == [(Chars(((97, 97),)), Chars(((98, 98),)))]
    assert (second.low, second.high) == (1, None)
    assert isinstance(second.item, Ref)
    assert grammar.rules[second.item.rule] == [(Repeat(Chars(((99, 99),)), 0, None),)]
    assert isinstance(third, Repeat)
    assert (third.low, third.high) == (1, None)


def test_a_maximum_above_the_most_is_none() -> None:
    assert "/[\\x{61}]/{3,}" in lark('root ::= "a"{3,5000}')


def test_recursion_at_the_end_is_repetition() -> None:
    for source in (
        'root ::= "a" root | "b"',
        'root ::= "a" (root)? | "b"',
        'root ::= ("a" root | "b")',
        'root ::= ws "b"\nws ::= ([ \\t] ws)?',
    ):
        assert "start: R0" in lark(source), "one regular expression"
    assert "start: r0" in lark('root ::= "(" root ")" | "a"')
    assert "start: r0" in lark('root ::= "a" root')


def test_depth_is_no_trouble() -> None:
    with pytest.raises(GbnfError, match="column 10009: more than 10000 rules and groups"):
        lark("root ::= " + "(" * 100_000)
    with pytest.raises(GbnfError, match="column 9009: this group is never closed"):
        lark("root ::= " + "(" * 9000)
    chain = "".join(f"r{n} ::= r{n + 1}\n" for n in range(9000))
    for deep in (
        "root ::= " + "(" * 9000 + '"a"' + ")" * 9000,
        'root ::= "a"' + "+" * 9000,
        f'root ::= r0\n{chain}r9000 ::= "a"',
    ):
        assert "start: r0" in lark(deep), "no regular expression, through which each token recurses"
    with pytest.raises(GbnfError, match="matches no text"):
        lark(f"root ::= r0\n{chain}r9000 ::= r0")
    shallow = "root ::= " + "(" * 50 + '"a"' + ")" * 50
    assert "start: R0" in lark(shallow)
