"""Parser of GBNF, the grammars of llama.cpp.

It accepts the grammars that llama.cpp accepts, with the same meaning. In addition, names may contain `_`, and
rules may be left recursive. Classes that match no character are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

__all__ = ["Alternative", "Chars", "Gbnf", "GbnfError", "Item", "Ref", "Repeat", "Token", "parse"]

MAX_REPEAT = 2000
"""Highest count of a repetition; a higher maximum means no maximum, as in llama.cpp."""

MAX_RULES = 10_000
"""Highest number of rules in a grammar, including groups and repeated items."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_DIGITS = re.compile(r"[0-9]+")
_INLINE_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_ANY_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")


class GbnfError(ValueError):
    """Error in a grammar; the message names line and column."""


@dataclass(frozen=True)
class Chars:
    """One character out of code point ranges, sorted and apart, without U+0000 and surrogates."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Ref:
    """A rule by its number."""

    rule: int


@dataclass(frozen=True)
class Token:
    """One token of the vocabulary, or any token but that one."""

    id: int
    negated: bool


@dataclass(frozen=True)
class Repeat:
    """An item `low` to `high` times; None: no maximum."""

    item: Chars | Ref | Token
    low: int
    high: int | None


Item = Chars | Ref | Token | Repeat
Alternative = tuple[Item, ...]


@dataclass
class Gbnf:
    """Rules by number; `root` is the first rule of a text. Each group is a rule without a name."""

    root: int
    rules: dict[int, list[Alternative]]
    names: dict[int, str]


def parse(source: str, token_of: Callable[[str], int | None]) -> Gbnf:
    """Parse a grammar.

    Args:
        source: the text.
        token_of: returns the id of the token `<name>` or `<[id]>`, None if there is none.

    Raises:
        GbnfError: names line, column and what was expected.
    """
    return _Parser(source, token_of).grammar()


@dataclass
class _Sequence:
    """Alternatives of the rule or group that is read; `start`: first item of the next repetition."""

    rule: int
    alternatives: list[Alternative] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    start: int = 0
    opened: int = 0


class _Parser:
    def __init__(self, source: str, token_of: Callable[[str], int | None]) -> None:
        self.source = source
        self.at = 0
        self.token_of = token_of
        self.numbers: dict[str, int] = {}
        self.used: dict[int, int] = {}  # first position of each rule's name
        self.rules: dict[int, list[Alternative]] = {}
        self.n_rules = 0
        self.stack: list[_Sequence] = []

    def grammar(self) -> Gbnf:
        self._skip(True)
        while self.at < len(self.source):
            self._rule()
        names = {number: name for name, number in self.numbers.items()}
        for number, at in self.used.items():
            if number not in self.rules:
                raise self._error(f"the rule {names[number]} is not defined", at)
        root = self.numbers.get("root")
        if root is None:
            known = ", ".join(sorted(self.numbers)[:8]) or "none"
            raise self._error(f"no rule is named root, with which the answer begins; there are: {known}", 0)
        return Gbnf(root, self.rules, names)

    def _rule(self) -> None:
        start = self.at
        name = self._match(_NAME)
        if not name:
            raise self._expected("the name of a rule")
        number = self._number(name, start)
        self._skip(False)
        if not self.source.startswith("::=", self.at):
            raise self._expected(f"::= after {name}")
        self.at += 3
        self._skip(True)
        self.stack = [_Sequence(number)]
        self._alternatives()
        if self.at < len(self.source) and self._peek() not in "\r\n":
            raise self._expected("a new line or the end after a rule")
        self._skip(True)

    def _alternatives(self) -> None:
        """Read up to the end of a rule; groups are on a stack, so nesting needs no recursion."""
        while self.stack:
            top = self.stack[-1]
            sign = self._peek()
            if sign == "|":
                self.at += 1
                self._skip(True)
                self._end_alternative(top)
            elif sign == "(":
                group = _Sequence(self._new_rule(), opened=self.at)
                self.at += 1
                self._skip(True)
                self.stack.append(group)
            elif sign and sign in "*+?{":
                self._repetition(top)
            elif (items := self._items(sign)) is not None:
                top.start = len(top.items)
                top.items.extend(items)
                self._skip(len(self.stack) > 1)
            else:
                self._close(top, sign)

    def _close(self, top: _Sequence, sign: str) -> None:
        nested = len(self.stack) > 1
        if nested and sign != ")":
            if not sign:
                raise self._error("this group is never closed: expected )", top.opened)
            raise self._expected("an item, | or )")
        self._end_alternative(top)
        self.rules[top.rule] = top.alternatives
        self.stack.pop()
        if nested:
            self.at += 1
            outer = self.stack[-1]
            outer.start = len(outer.items)
            outer.items.append(Ref(top.rule))
            self._skip(len(self.stack) > 1)

    def _end_alternative(self, top: _Sequence) -> None:
        top.alternatives.append(tuple(top.items))
        top.items, top.start = [], 0

    def _items(self, sign: str) -> Iterable[Item] | None:
        if sign == '"':
            return self._literal()
        if sign == "[":
            return [self._class()]
        if sign == ".":
            self.at += 1
            return [Chars(_ranges([(0, _LAST)]))]
        if sign and sign in "<!":
            return [self._token()]
        start = self.at
        if name := self._match(_NAME):
            return [Ref(self._number(name, start))]
        return None

    def _literal(self) -> list[Item]:
        opened = self.at
        self.at += 1
        items: list[Item] = []
        while self._peek() != '"':
            start = self.at
            code = self._char('"', opened)
            items.append(Chars(self._checked([(code, code)], start)))
        self.at += 1
        return items

    def _class(self) -> Item:
        opened = self.at
        self.at += 1
        negated = self._peek() == "^"
        self.at += negated
        found: list[tuple[int, int]] = []
        while self._peek() != "]":
            start = self.at
            low = high = self._char("]", opened)
            if self._peek() == "-" and self.source[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                high = self._char("]", opened)
                if high < low:
                    text = self.source[start : self.at]
                    raise self._error(f"the range {text} ends before it begins: swap its ends", start)
            found.append((low, high))
        self.at += 1
        if not found:
            raise self._error("this class is empty: write the characters that it matches", opened)
        return Chars(self._checked(_inverted(found) if negated else found, opened))

    def _checked(self, ranges: list[tuple[int, int]], at: int) -> tuple[tuple[int, int], ...]:
        kept = _ranges(ranges)
        if not kept:
            raise self._error("this matches no character that a text can contain", at)
        return kept

    def _char(self, closing: str, opened: int) -> int:
        char = self._peek()
        if not char:
            raise self._error(f"this is never closed: expected {closing}", opened)
        start = self.at
        self.at += 1
        if char != "\\":
            return ord(char)
        kind = self._peek()
        self.at += 1
        if kind in _HEX:
            digits = self.source[self.at : self.at + _HEX[kind]]
            if len(digits) < _HEX[kind] or not all(d in "0123456789abcdefABCDEF" for d in digits):
                raise self._error(f"expected {_HEX[kind]} hexadecimal digits after \\{kind}", start)
            self.at += len(digits)
            return int(digits, 16)
        if not kind or kind not in _ESCAPES:
            raise self._error(
                f"unknown escape {self.source[start : self.at]!r}: expected one of "
                r"\x \u \U \t \r \n \\ \" \[ \] \-",
                start,
            )
        return ord(_ESCAPES[kind])

    def _token(self) -> Item:
        start = self.at
        negated = self._peek() == "!"
        self.at += negated
        end = self.source.find(">", self.at) + 1
        if self._peek() != "<" or not end:
            raise self._error("expected a token, as <name> or <[id]>", start)
        name = self.source[self.at : end]
        self.at = end
        token = self.token_of(name)
        if token is None:
            raise self._error(f"the vocabulary has no token {name} that may be in an answer", start)
        return Token(token, negated)

    def _repetition(self, top: _Sequence) -> None:
        sign, start = self._peek(), self.at
        self.at += 1
        nested = len(self.stack) > 1
        self._skip(nested)
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign) or self._counts(nested)
        unit = top.items[top.start :]
        if not unit:
            raise self._error(f"expected something to repeat before {sign}", start)
        if len(unit) == 1 and not isinstance(unit[0], Repeat):
            item = unit[0]
        else:
            item = Ref(self._new_rule())
            self.rules[item.rule] = [tuple(unit)]
        top.items[top.start :] = [Repeat(item, low, high)] if high != 0 else []

    def _counts(self, nested: bool) -> tuple[int, int | None]:
        start = self.at
        low = self._count(nested)
        high: int | None = low
        if self._peek() == ",":
            self.at += 1
            self._skip(nested)
            high = self._count(nested) if self._peek().isdigit() else None
        if self._peek() != "}":
            raise self._expected("a count, a comma or }")
        self.at += 1
        self._skip(nested)
        if low > MAX_REPEAT:
            raise self._error(f"{low} repetitions: the most are {MAX_REPEAT}", start)
        if high is not None and high < low:
            raise self._error(f"{{{low},{high}}}: the maximum is below the minimum", start)
        return low, high if high is None or high <= MAX_REPEAT else None

    def _count(self, nested: bool) -> int:
        digits = self._match(_DIGITS)
        if not digits:
            raise self._expected("a count")
        self._skip(nested)
        return int(digits[:10])  # more digits are refused, or no limit, as well

    def _number(self, name: str, at: int) -> int:
        if name not in self.numbers:
            self.numbers[name] = self._new_rule()
            self.used[self.numbers[name]] = at
        return self.numbers[name]

    def _new_rule(self) -> int:
        if self.n_rules == MAX_RULES:
            raise self._error(f"more than {MAX_RULES} rules and groups: leave some out", self.at)
        self.n_rules += 1
        return self.n_rules - 1

    def _peek(self) -> str:
        return self.source[self.at : self.at + 1]

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.source, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found[0]

    def _skip(self, lines: bool) -> None:
        self._match(_ANY_SPACE if lines else _INLINE_SPACE)

    def _expected(self, what: str) -> GbnfError:
        found = repr(self._peek()) if self._peek() else "the end"
        return self._error(f"expected {what}, found {found}", self.at)

    def _error(self, message: str, at: int) -> GbnfError:
        line = self.source.count("\n", 0, at) + 1
        column = at - self.source.rfind("\n", 0, at)
        return GbnfError(f"line {line}, column {column}: {message}")


def _inverted(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out, at = [], 0
    for low, high in sorted(ranges):
        if at < low:
            out.append((at, low - 1))
        at = max(at, high + 1)
    return [*out, (at, _LAST)]


def _ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return sorted, disjoint ranges without U+0000 and surrogates, which no text contains."""
    out: list[tuple[int, int]] = []
    cut = [part for low, high in ranges for part in _parts(max(low, 1), min(high, _LAST))]
    for low, high in sorted(cut):
        if out and low <= out[-1][1] + 1:
            out[-1] = out[-1][0], max(out[-1][1], high)
        else:
            out.append((low, high))
    return tuple(out)


def _parts(low: int, high: int) -> Iterable[tuple[int, int]]:
    below, above = (low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)
    return [part for part in (below, above) if part[0] <= part[1]]
