"""What a template may be written with; what can grow or take long becomes a call that is metered.

A rewritten node is a filter whose name no template can write, so that Jinja's own compiler does the rest.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

__all__ = [
    *("COMPARE", "CONCAT", "DICT", "EACH", "MADE", "NAMED", "SLICE"),
    *("GenerationBlocks", "looks_for", "metered"),
]

EACH, CONCAT, COMPARE, MADE, DICT, SLICE = " each", " concat", " compare", " made", " dict", " slice"
NAMED = " named"

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
    """`{% generation %}` … `{% endgeneration %}`, which published templates put around what a model said."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def metered(tree: nodes.Template) -> nodes.Template:
    """The template with every loop, comparison, concatenation, slice and literal as a metered call.

    Raises TemplateSyntaxError where it is written with what chat templates do without.
    """
    rewritten: nodes.Template = _Rewriter().visit(tree)
    return rewritten


def _call(name: str, value: Any, *args: Any) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


class _Rewriter(NodeTransformer):
    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
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
        self.generic_visit(node)
        node.iter = _call(EACH, node.iter)
        return node

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
    """Return whether a template loops over the parts of a content, and whether it asks what a value is."""
    names = _content_names(tree)
    loops = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    kinds = ("string", "sequence", "iterable", "mapping")
    asks = any(test.name in kinds for test in tree.find_all(nodes.Test))
    return loops, asks


def _content_names(tree: nodes.Template) -> set[str]:
    """Return the variables and macro parameters that are a message's content somewhere in the template."""
    names = {"content"}
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    before = 0
    while len(names) > before:  # a name may stand for another one
        before = len(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
                names.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            for parameter, value in zip(macro.args if macro else (), call.args, strict=False):
                if _is_content(value, names):
                    names.add(parameter.name)
    return names


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    match node:
        case nodes.Getattr():
            return bool(node.attr == "content")
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        case nodes.Name():
            return node.name in names
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value="content"), *_]):
            return True
        case nodes.Or() | nodes.And():
            return _is_content(node.left, names) or _is_content(node.right, names)
        case nodes.CondExpr():
            return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    return False
