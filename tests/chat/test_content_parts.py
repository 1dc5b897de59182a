"""Contents in parts: as plain Jinja renders them if the template is made for them, else as one text."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from jinja2 import Template
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pyvelo.chat.sandbox_syntax import GenerationBlocks
from pyvelo.chat.template import ChatTemplate
from pyvelo.errors import TemplateError

from .upstream_templates import NAMES, NOW, source_of, upstream_template

ROLES = [("user",), ("user", "assistant", "user"), ("system", "user", "assistant", "user")]


def refuse(message: str) -> None:
    raise ValueError(message)


@cache
def jinja() -> ImmutableSandboxedEnvironment:
    """Return plain Jinja with what chat templates expect of it."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    made.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    made.globals.update(raise_exception=refuse, strftime_now=NOW.strftime)
    return made


def talk(roles: tuple[str, ...], n_parts: int, *, joined: bool) -> list[dict[str, Any]]:
    found = []
    for role in roles:
        texts = [f"{word} {role}" for word in ("alpha", "beta")[:n_parts]]
        content: Any = "".join(texts) if joined else [{"type": "text", "text": text} for text in texts]
        found.append({"role": role, "content": content})
    return found


def by_jinja(template: Template, messages: list[dict[str, Any]]) -> str | None:
    names = {"tools": None, "documents": None, "add_generation_prompt": True}
    try:
        return template.render(messages=messages, bos_token="<BOS>", eos_token="<EOS>", **names)
    except Exception:
        return None


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_content(name: str) -> None:
    template = upstream_template(name)
    plain = jinja().from_string(source_of(name))

    def ours(messages: list[dict[str, Any]]) -> str:
        try:
            return template.render(messages)
        except TemplateError as error:
            return str(error)

    for roles in ROLES:
        text, parts = talk(roles, 1, joined=True), talk(roles, 1, joined=False)
        rendered, expected = ours(text), by_jinja(plain, text)
        assert rendered == ours(parts)
        if expected is not None:
            assert rendered == expected
            if by_jinja(plain, parts) == expected:  # the template is made for parts
                several = talk(roles, 2, joined=False)
                assert ours(several) == by_jinja(plain, several)


@pytest.mark.parametrize(
    "source",
    [
        "{% set c = m.content %}{% if c is string %}{{ c }}{% else %}LOOP{% endif %}",
        "{% set c = m.get('content') or [] %}{% if c is string %}{{ c }}{% else %}LOOP{% endif %}",
        "{% set b = m['content'] %}{% set c = b if b else [] %}{% if c is string %}{{ c }}{% else %}"
        "LOOP{% endif %}",
        "{% macro f(x, c) %}{% if c is string %}{{ c }}{% else %}LOOP{% endif %}{% endmacro %}"
        "{{ f(1, m.content) }}",
        "{% set c = m.content %}LOOP",
    ],
)
def test_parts_under_another_name(source: str) -> None:
    source = source.replace("LOOP", "{% for p in c %}{{ p.text }}{% endfor %}")
    template = ChatTemplate("{% for m in messages %}" + source + "{% endfor %}")
    assert template.render(talk(("user",), 2, joined=False)) == "alpha userbeta user"
    assert template.render(talk(("user",), 2, joined=True)) == "alpha userbeta user"


def test_parts_are_text_where_a_template_wants_text() -> None:
    source = "{{ messages[0].content | trim }} {{ messages[0].content }}"
    source += "{% for p in messages[1].content %}{{ p.text }}{% endfor %}{{ messages[1].content is string }}"
    shown = ChatTemplate(source).render(talk(("system", "user"), 2, joined=False))
    assert shown == "alpha system\nbeta system alpha system\nbeta systemalpha userbeta userFalse"
