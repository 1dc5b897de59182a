"""Elimination of recursion at the end of alternatives: such rules match a regular language.

llguidance's time for a character grows with the depth of such calls. llama.cpp writes automata in this form,
such as "any text up to </think>".
"""

from __future__ import annotations

from collections.abc import Iterable

from pyvelo.grammar.gbnf import Alternative, Gbnf, Ref, Repeat

__all__ = ["without_cycles"]

MAX_ITEMS = 20_000
"""Items of the rules of one cycle during its elimination; a larger cycle stays as it is."""


def without_cycles(grammar: Gbnf, order: Iterable[int]) -> None:
    """Rewrite the rules that call each other at the ends of their alternatives by repetitions.

    Args:
        order: the rules that the root needs, callers before the rules that only they call.
    """
    for cycle in _cycles(grammar, [*order]):
        found = _solved(grammar, cycle) if _is_linear(grammar, cycle) else None
        if found is not None:
            grammar.rules.update(found)


def _cycles(grammar: Gbnf, order: list[int]) -> list[list[int]]:
    """Return the sets of rules that call each other, each in the order of `order` (Tarjan's algorithm)."""
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    open_rules: list[int] = []
    is_open: set[int] = set()
    found: list[list[int]] = []
    place = {rule: index for index, rule in enumerate(order)}
    for root in order:
        todo = [(root, iter(_called(grammar, root)))] if root not in number else []
        while todo:
            rule, calls = todo[-1]
            if rule not in number:
                number[rule] = low[rule] = len(number)
                open_rules.append(rule)
                is_open.add(rule)
            new = None
            for called in calls:
                if called not in number:
                    new = called
                    break
                if called in is_open:
                    low[rule] = min(low[rule], number[called])
            if new is not None:
                todo.append((new, iter(_called(grammar, new))))
                continue
            todo.pop()
            if todo:
                caller = todo[-1][0]
                low[caller] = min(low[caller], low[rule])
            if low[rule] == number[rule]:
                at = open_rules.index(rule)
                members, open_rules[at:] = open_rules[at:], []
                is_open.difference_update(members)
                if len(members) > 1:
                    found.append(sorted(members, key=place.__getitem__))
    return found


def _called(grammar: Gbnf, rule: int) -> list[int]:
    inner = (
        item.item if isinstance(item, Repeat) else item
        for alternative in grammar.rules[rule]
        for item in alternative
    )
    return [item.rule for item in inner if isinstance(item, Ref)]


def _is_linear(grammar: Gbnf, cycle: list[int]) -> bool:
    """Return whether the rules of a cycle call each other only as the last item of an alternative."""
    members = set(cycle)
    for rule in cycle:
        for alternative in grammar.rules[rule]:
            for item in alternative[:-1]:
                inner = item.item if isinstance(item, Repeat) else item
                if isinstance(inner, Ref) and inner.rule in members:
                    return False
            last = alternative[-1] if alternative else None
            if isinstance(last, Repeat) and isinstance(last.item, Ref) and last.item.rule in members:
                return False
    return True


def _solved(grammar: Gbnf, cycle: list[int]) -> dict[int, list[Alternative]] | None:
    """Return the rules of a cycle, each without calls of itself or of later rules; None if too large.

    From the last rule to the first, each is written without itself, and then in place of its calls.
    """
    rules = {rule: [*grammar.rules[rule]] for rule in cycle}
    new = max(grammar.rules) + 1
    for index in range(len(cycle) - 1, -1, -1):
        rule = cycle[index]
        loops = [part[:-1] for part in rules[rule] if part and part[-1] == Ref(rule)]
        ends = [part for part in rules[rule] if not part or part[-1] != Ref(rule)]
        if not ends:
            return None
        if loops := [part for part in loops if part]:
            rules[new] = loops
            ends = [(Repeat(Ref(new), 0, None), *part) for part in ends]
            new += 1
        rules[rule] = ends
        for caller in cycle[:index]:
            rules[caller] = _replaced(rules[caller], rule, ends)
        if sum(len(part) + 1 for parts in rules.values() for part in parts) > MAX_ITEMS:
            return None
    return rules


def _replaced(alternatives: list[Alternative], rule: int, ends: list[Alternative]) -> list[Alternative]:
    """Return alternatives with the alternatives of a rule in place of its call at the end."""
    found: dict[Alternative, None] = {}
    for part in alternatives:
        if part and part[-1] == Ref(rule):
            found |= dict.fromkeys(part[:-1] + end for end in ends)
        else:
            found[part] = None
    return list(found)
