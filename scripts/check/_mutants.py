"""Small changes to Python source, one at a time, that a good test suite must notice."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Mutant", "mutants"]

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
DROPPED_CALLS = ("reversed", "sorted")


@dataclass(frozen=True)
class Mutant:
    """Change of `was` to `becomes` at bytes `start` to `end` of a file; `line` is the line's text."""

    file: str
    number: int
    line: str
    was: str
    becomes: str
    start: int
    end: int

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.becomes.encode() + source[self.end :]

    def __str__(self) -> str:
        was, becomes = (" ".join(text.split()) for text in (self.was, self.becomes))
        return f"{self.file}:{self.number}: {was}  →  {becomes}"


def mutants(file: str, source: bytes) -> list[Mutant]:
    """Return all changes to a file, in the order of the lines.

    Parts without behaviour stay unchanged: annotations and their imports, strings, docstrings, `__all__`,
    `__slots__`.
    """
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = source.decode().splitlines()
    found: dict[tuple[int, int, str], Mutant] = {}
    for node, becomes in _walk(ast.parse(source), source.decode()):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        mutant = Mutant(
            file=file,
            number=node.lineno,
            line=lines[node.lineno - 1].strip(),
            was=source[start:end].decode(),
            becomes=becomes,
            start=start,
            end=end,
        )
        if mutant.was != becomes:
            found.setdefault((start, end, becomes), mutant)
    return sorted(found.values(), key=lambda mutant: (mutant.start, mutant.end))


Change = tuple[ast.expr | ast.stmt, str]


def _walk(node: ast.AST, source: str) -> Iterator[Change]:
    """Yield the changes to a node and to all below it."""
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("__"):
        return
    if isinstance(node, ast.stmt):
        yield from _statement(node, source)
    elif isinstance(node, ast.expr):
        yield from _expression(node, source)
    elif isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield test, f"not ({_text(test, source)})"
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child, source)


def _statement(node: ast.stmt, source: str) -> Iterator[Change]:
    if isinstance(node, ast.If | ast.While):
        yield node.test, f"not ({_text(node.test, source)})"
    elif isinstance(node, ast.Return) and node.value is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield node, "return None"
    elif isinstance(node, ast.Break):
        yield node, "continue"
    elif isinstance(node, ast.Continue):
        yield node, "break"
        yield node, "pass"
    elif isinstance(node, ast.AugAssign):
        yield node, "pass"
        if other := ARITHMETIC.get(type(node.op)):
            yield node, _with(node, "op", other())
    elif (
        isinstance(node, ast.Raise)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript))
    ):
        yield node, "pass"


def _expression(node: ast.expr, source: str) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for other in COMPARISONS[type(operator)]:
                changed = copy.deepcopy(node)
                changed.ops[index] = other()
                yield node, ast.unparse(changed)
    elif isinstance(node, ast.BinOp) and (swapped := ARITHMETIC.get(type(node.op))):
        yield node, _with(node, "op", swapped())
    elif isinstance(node, ast.BoolOp):
        yield node, f"({_with(node, 'op', ast.Or() if isinstance(node.op, ast.And) else ast.And())})"
    elif isinstance(node, ast.UnaryOp):
        yield node, _text(node.operand, source)
    elif isinstance(node, ast.IfExp):
        yield node.test, f"not ({_text(node.test, source)})"
    elif isinstance(node, ast.Constant):
        yield from ((node, text) for text in _constant(node.value))
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        for bound in ("lower", "upper", "step"):
            if getattr(node.slice, bound) is not None:
                changed_slice = copy.deepcopy(node)
                setattr(changed_slice.slice, bound, None)
                yield node, ast.unparse(changed_slice)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in CALLS:
            yield node.func, CALLS[node.func.id]
        elif node.func.id in DROPPED_CALLS:
            yield node, f"({_text(node.args[0], source)})"


def _constant(value: object) -> Iterator[str]:
    """Yield a number plus or minus one, or the opposite truth value; strings stay unchanged."""
    if isinstance(value, bool):
        yield str(not value)
    elif isinstance(value, int | float):
        yield str(value + 1)
        yield f"({value - 1})"


def _with(node: ast.AST, field: str, value: ast.AST) -> str:
    changed = copy.deepcopy(node)
    setattr(changed, field, value)
    return ast.unparse(changed)


def _text(node: ast.expr, source: str) -> str:
    return ast.get_source_segment(source, node) or ast.unparse(node)
