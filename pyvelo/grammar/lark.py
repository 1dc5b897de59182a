"""Translation of GBNF to llguidance's Lark.

A grammar without recursion becomes one regular expression. Any other becomes rules over single characters:
llguidance takes the longest terminal if several match, but GBNF has no terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pyvelo.grammar.gbnf import Alternative, Chars, Gbnf, GbnfError, Item, Ref, Repeat, Token, parse
from pyvelo.grammar.linear import without_cycles

__all__ = ["to_lark"]

_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Lets the model choose the tokens of forced text, as upstream does; forced text may have no end."""

_MAX_DEPTH = 100
"""Highest depth of a regular expression: each token recurses through it."""


def to_lark(source: str, token_of: Callable[[str], int | None], banned: Iterable[int] = ()) -> str:
    """Translate a grammar.

    Args:
        source: the grammar.
        token_of: see `gbnf.parse`.
        banned: tokens that a negated token does not match.

    Raises:
        GbnfError: it is not GBNF, or a rule can match nothing.
    """
    grammar = parse(source, token_of)
    order = _reachable(grammar)
    _check_alive(grammar, order)
    without_cycles(grammar, order)
    order = _reachable(grammar)
    for rule in order:
        grammar.rules[rule] = _without_tail_call(grammar, rule)
    order = _reachable(grammar)
    excluded = sorted(banned)
    if _is_regular(grammar, order):
        lines = ["start: R0"] + [_line(f"R{n}", grammar, rule, order, excluded) for rule, n in order.items()]
    else:
        lines = ["start: r0"] + [_line(f"r{n}", grammar, rule, order, excluded) for rule, n in order.items()]
    return _OPTIONS + "\n".join(lines) + "\n"


def _reachable(grammar: Gbnf) -> dict[int, int]:
    """Return the rules that the root needs, numbered from 0 in the order of their first use."""
    order = {grammar.root: 0}
    todo = [grammar.root]
    while todo:
        for rule in _called(grammar.rules[todo.pop()]):
            if rule not in order:
                order[rule] = len(order)
                todo.append(rule)
    return order


def _called(alternatives: Iterable[Alternative]) -> Iterator[int]:
    for alternative in alternatives:
        for item in alternative:
            inner = item.item if isinstance(item, Repeat) else item
            if isinstance(inner, Ref):
                yield inner.rule


def _users(grammar: Gbnf, order: Iterable[int]) -> dict[int, set[int]]:
    users: dict[int, set[int]] = {rule: set() for rule in order}
    for rule in order:
        for called in _called(grammar.rules[rule]):
            users[called].add(rule)
    return users


def _check_alive(grammar: Gbnf, order: dict[int, int]) -> None:
    """Refuse rules that always begin with themselves, because no text matches them."""
    users = _users(grammar, order)
    nullable = _closure(order, users, lambda rule, known: any(
        all(_skips(item, known) for item in alternative) for alternative in grammar.rules[rule]
    ))  # fmt: skip
    begun = _closure(order, users, lambda rule, known: any(
        _begins(alternative, nullable, known) for alternative in grammar.rules[rule]
    ))  # fmt: skip
    for rule in order:
        if rule not in nullable and rule not in begun:
            name = grammar.names.get(rule, "of a group")
            raise GbnfError(f"the rule {name} matches no text: each of its alternatives begins with itself")


def _closure(
    order: Iterable[int], users: dict[int, set[int]], holds: Callable[[int, set[int]], bool]
) -> set[int]:
    """Return the smallest set of rules for which `holds`, given the rules in the set."""
    known: set[int] = set()
    todo = list(order)
    while todo:
        rule = todo.pop()
        if rule not in known and holds(rule, known):
            known.add(rule)
            todo += users[rule] - known
    return known


def _skips(item: Item, nullable: set[int]) -> bool:
    if isinstance(item, Repeat):
        return item.low == 0 or _skips(item.item, nullable)
    return isinstance(item, Ref) and item.rule in nullable


def _begins(alternative: Alternative, nullable: set[int], begun: set[int]) -> bool:
    """Return whether a text of the alternative has a first character."""
    for item in alternative:
        inner = item.item if isinstance(item, Repeat) else item
        if not isinstance(inner, Ref) or inner.rule in begun:
            return True
        if not _skips(item, nullable):
            return False
    return False


def _without_tail_call(grammar: Gbnf, rule: int) -> list[Alternative]:
    """Rewrite `x ::= a x | b` as `x ::= a* b`: recursion at the end is common, and slow in llguidance."""
    own = Ref(rule)
    spread = [part for alternative in grammar.rules[rule] for part in _spread(grammar, rule, alternative)]
    loops = [part[:-1] for part in spread if part and part[-1] == own]
    ends = [part for part in spread if not part or part[-1] != own]
    if not loops or not ends:
        return grammar.rules[rule]
    first = max(grammar.rules) + 1
    grammar.rules[first] = loops
    if len(ends) == 1:
        return [(Repeat(Ref(first), 0, None), *ends[0])]
    grammar.rules[first + 1] = ends
    return [(Repeat(Ref(first), 0, None), Ref(first + 1))]


def _spread(grammar: Gbnf, rule: int, alternative: Alternative) -> list[Alternative]:
    """Replace a group at the end of an alternative by its alternatives if it ends in the rule."""
    last = alternative[-1] if alternative else None
    optional = isinstance(last, Repeat) and (last.low, last.high) == (0, 1)
    group = last.item if isinstance(last, Repeat) and optional else last
    if not isinstance(group, Ref) or group.rule in grammar.names or group.rule == rule:
        return [alternative]
    inner = grammar.rules[group.rule]
    if not any(part and part[-1] == Ref(rule) for part in inner):
        return [alternative]
    head = alternative[:-1]
    return [head + part for part in inner] + ([head] if optional else [])


def _is_regular(grammar: Gbnf, order: dict[int, int]) -> bool:
    """Return whether no rule needs itself, none is nested too deeply, and none names a token."""
    items = (item for rule in order for alternative in grammar.rules[rule] for item in alternative)
    if any(isinstance(item.item if isinstance(item, Repeat) else item, Token) for item in items):
        return False
    waits = {rule: set(_called(grammar.rules[rule])) for rule in order}
    users = _users(grammar, order)
    ready = [rule for rule, called in waits.items() if not called]
    for _ in range(_MAX_DEPTH):
        if not ready:
            break
        following = []
        for rule in ready:
            for user in users[rule]:
                waits[user].discard(rule)
                if not waits[user]:
                    following.append(user)
        ready = following
    return not any(waits.values())


def _line(name: str, grammar: Gbnf, rule: int, order: dict[int, int], banned: list[int]) -> str:
    alternatives = dict.fromkeys(grammar.rules[rule])  # each once
    written = (
        " ".join(_written(item, name[0], order, banned) for item in alternative) or '""'
        for alternative in alternatives
    )
    return f"{name}: {' | '.join(written)}"


def _written(item: Item, kind: str, order: dict[int, int], banned: list[int]) -> str:
    if isinstance(item, Ref):
        return f"{kind}{order[item.rule]}"
    if isinstance(item, Chars):
        return f"/[{''.join(map(_range, item.ranges))}]/"
    if isinstance(item, Token):
        return f"<[^{','.join(map(str, sorted({item.id, *banned})))}]>" if item.negated else f"<[{item.id}]>"
    inner = _written(item.item, kind, order, banned)
    counts = f"{{{item.low},{'' if item.high is None else item.high}}}"
    return inner + {"{0,}": "*", "{1,}": "+", "{0,1}": "?"}.get(counts, counts)


def _range(ends: tuple[int, int]) -> str:
    low, high = ends
    return f"\\x{{{low:x}}}" if low == high else f"\\x{{{low:x}}}-\\x{{{high:x}}}"
