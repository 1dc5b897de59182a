"""Allowed syntax of templates, and the rewriting of each node that can grow or take long to a metered call.

A rewritten node is a filter whose name no template can write, so Jinja's own compiler does the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

__all__ = [
    *("COMPARE", "CONCAT", "DICT", "EACH", "MADE", "NAMED", "SLICE", "STEP"),
    *("GenerationBlocks", "looks_for", "metered"),
]

EACH, CONCAT, COMPARE, MADE, DICT, SLICE = " each", " concat", " compare", " made", " dict", " slice"
NAMED, STEP = " named", " step"

ALLOWED: tuple[type[nodes.Node], ...] = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Scope),
    *(nodes.For, nodes.If, nodes.Break, nodes.Continue, nodes.CondExpr),
    *(nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With),
    *(nodes.Assign, nodes.AssignBlock, nodes.Name, nodes.NSRef, nodes.Const),
    *(nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Keyword),
    *(nodes.BinExpr, nodes.UnaryExpr, nodes.Compare, nodes.Operand, nodes.Concat),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Call, nodes.Filter, nodes.Test),
)


class GenerationBlocks(Extension):
    """Block `{% generation %}` … `{% endgeneration %}` of published templates, around the model's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def metered(tree: nodes.Template) -> nodes.Template:
    """Return the template with every loop, comparison, concatenation, slice and literal as a metered call.

    Raises:
        TemplateSyntaxError: it uses syntax that chat templates do not need.
    """
    rewritten: nodes.Template = _Rewriter().visit(tree)
    return rewritten


def _call(name: str, value: Any, *args: Any) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


class _Rewriter(NodeTransformer):
    def __init__(self) -> None:
        self._visited = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self._visited += 1
        if not isinstance(node, ALLOWED):
            kind = type(node).__name__.lower()
            raise TemplateSyntaxError(f"a chat template has no {kind} statement", node.lineno)
        return super().visit(node, *args, **kwargs)

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        """Rewrite what is below the node, and `*values` and `**values` of a call."""
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, (nodes.Call, nodes.Filter, nodes.Test)):
            node.dyn_args = _call(EACH, node.dyn_args) if node.dyn_args else None
            node.dyn_kwargs = _call(NAMED, node.dyn_kwargs) if node.dyn_kwargs else None
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        size = self._stepping(node)
        node.iter = _call(EACH, node.iter)
        node.test = _call(STEP, node.test, size) if node.test else None
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self._stepping(node)
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self._stepping(node)
        return node

    def _stepping(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Const:
        """Rewrite a node whose body can run often, and count its nodes each time; return how many it has."""
        before = self._visited
        self.generic_visit(node)
        size = nodes.Const(self._visited - before, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_call(STEP, size, size), lineno=node.lineno))
        return size

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(CONCAT, *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operands: list[nodes.Expr] = []
        for operand in node.ops:
            operands += (nodes.Const(operand.op, lineno=node.lineno), operand.expr)
        return _call(COMPARE, node.expr, *operands)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _call(MADE, node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call(MADE, node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        pairs = [nodes.Tuple([item.key, item.value], "load", lineno=node.lineno) for item in node.items]
        return _call(DICT, nodes.List(list(pairs), lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _call(SLICE, node.node, *(bound or nodes.Const(None, lineno=node.lineno) for bound in bounds))


def looks_for(tree: nodes.Template) -> tuple[bool, bool]:
    """Return whether a template loops over the parts of a content, and whether it tests a value's type."""
    names = _content_names(tree)
    loops = any(not names.isdisjoint(_sources(loop.iter)) for loop in tree.find_all(nodes.For))
    kinds = ("string", "sequence", "iterable", "mapping")
    asks = any(test.name in kinds for test in tree.find_all(nodes.Test))
    return loops, asks


def _content_names(tree: nodes.Template) -> set[str]:
    """Return the variables and macro parameters that are a message's content somewhere in the template."""
    values: list[tuple[str, nodes.Node]] = []
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            values.append((assign.target.name, assign.node))
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        parameters = [parameter.name for parameter in macro.args] if macro else []
        values += zip(parameters, call.args, strict=False)
    copies: dict[str, list[str]] = {}
    for name, value in values:
        for source in _sources(value):
            copies.setdefault(source, []).append(name)
    names: set[str] = set()
    stack = ["content"]
    while stack:
        name = stack.pop()
        if name not in names:
            names.add(name)
            stack += copies.get(name, ())
    return names


def _sources(value: nodes.Node | None) -> Iterator[str]:
    """Yield the names whose value an expression may have, "content" for the content of a message."""
    stack = [value]
    while stack:
        match stack.pop():
            case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
                yield "content"
            case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value="content"), *_]):
                yield "content"
            case nodes.Name(name=name):
                yield name
            case nodes.Or() | nodes.And() as pair:
                stack += [pair.left, pair.right]
            case nodes.CondExpr() as choice:
                stack += [choice.expr1, choice.expr2]
