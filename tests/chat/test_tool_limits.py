"""Many tools fit into the limits of upstream's template engine; what does not gets an error of one line."""

from __future__ import annotations

from typing import Any

import pytest

from pyvelo.errors import ConfigError
from pyvelo.native.chat_format import ChatFormat

from .answers import QWEN, function
from .upstream_templates import NAMES, source_of

USER = [{"role": "user", "content": "Hi"}]
COSTLY = ("Kimi-K3", "MiniMax-M2", "Qwen3-Coder", "google-gemma-4-31B-it")


def many_tools(n_tools: int, n_fields: int) -> list[dict[str, Any]]:
    field = {"type": "string", "description": "A field of the call."}
    fields = {f"field_{number}": field for number in range(n_fields)}
    return [function(f"tool_{number}", (*fields,), **fields) for number in range(n_tools)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in COSTLY else pytest.mark.slow) for name in NAMES]
)
def test_a_hundred_tools_of_twelve_fields(name: str) -> None:
    plan = ChatFormat(source_of(name)).plan({"messages": USER, "tools": many_tools(100, 12)})
    assert plan.facts["generation_prompt"] in plan.facts["prompt"]


LOOPS = "{% for a in range(100000) %}{% for b in range(100000) %}{{ a }}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(s='xyz') %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}"

SPLIT = "{% for a in range(300) %}{{ ('a,' * 4000).split(',') | length }}{% endfor %}"
REPLACE = "{% for a in range(300) %}{{ ('a' * 4000) | replace('a', 'bb') | length }}{% endfor %}"
SEARCH = "{% set s = 'a' * 1000000 %}{{ s ~ 'b' in s ~ s }}"


@pytest.mark.parametrize(
    ("work", "reached"),
    [
        (LOOPS, "operations"),
        (DOUBLING, "memory"),
        (SPLIT, "operations"),
        (REPLACE, "operations"),
        (SEARCH, "too long a text"),
    ],
)
def test_what_is_too_costly_gets_an_error_of_one_line(work: str, reached: str) -> None:
    source = "{% if messages[0].content == 'work' %}" + work + "{% endif %}{{ messages[0].content }}"
    with pytest.raises(ConfigError) as refused:
        ChatFormat(source).plan({"messages": [{"role": "user", "content": "work"}]})
    message = str(refused.value)
    assert "the chat template is too costly for these messages and tools: it " in message
    assert reached in message
    assert "\n" not in message


@pytest.mark.parametrize("name", [QWEN, "Qwen3-Coder"])
def test_the_text_of_a_schema_is_not_printed(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Upstream warns of a pattern that it cannot follow."""
    secret = {"type": "string", "pattern": r"^(?=secret)\bword\1$"}
    tools = [function("tool", ("field",), field=secret)]
    request = {"messages": USER, "tools": tools, "tool_choice": "required"}
    plan = ChatFormat(source_of(name)).plan(request)
    assert plan.facts["grammar"]
    assert capfd.readouterr() == ("", "")
