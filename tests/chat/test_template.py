"""A chat template as a user of it meets it: messages, arguments, what templates may use, the fallback."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import SandboxedEnvironment

from pyvelo.chat.template import BUILT_IN, ChatTemplate
from pyvelo.errors import RequestError, TemplateError

from .conversations import CONVERSATIONS, WEATHER

USER = {"role": "user", "content": "Hi"}
CHATML = ChatTemplate(BUILT_IN["chatml"], name="chatml")


def show(source: str, messages: Any = (USER,), **arguments: Any) -> str:
    template = ChatTemplate(source, bos="<s>", eos="</s>", now=lambda: datetime(2026, 3, 4, 5, 6, 7))
    return template.render(list(messages), **arguments)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi</s>"),
        ("{{ {'a': '<é&>', 'b': [1, none, true]} | tojson }}", '{"a": "<é&>", "b": [1, null, true]}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ {'b': 1, 'a': 'é'} | tojson(sort_keys=true, ensure_ascii=true) }}", '{"a": "\\u00e9", "b": 1}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ ('[1, {\"a\": 2}]' | from_json)[1].a }}", "2"),
        ("{{ strftime_now('%d %b %Y') }}", "04 Mar 2026"),
        ("a{% generation %}b{% set x = 1 %}{% endgeneration %}c{{ x }}", "abc"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 5 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "0134"),
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{{ tools is none }} {{ documents is none }} {{ x is defined }}", "True True False"),
        ("{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}",
         "a2Falseb1True"),
        ("{% macro m(a, b=2) %}{{ a }}-{{ b }}{{ caller() if caller else '' }}{% endmacro %}{{ m(1) }}"
         "{% call m(3) %}!{% endcall %}", "1-23-2!"),
        ("{% set n = namespace(i=0) %}{% for m in [1, 2] %}{% set n.i = n.i + m %}{% endfor %}{{ n.i }}",
         "3"),
        ("{{ 'a-b-c'.split('-', 1)[1] }} {{ 'x%sz%d' % ('y', 1) }} {{ '{} {a:>3}'.format(1, a=2) }}",
         "b-c xyz1 1   2"),
        ("{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 'a' in 'cat' }} {{ 4 not in [4] }}", "True False True False"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(',') }}",
         "Hi"),
        ("{{ '<b>' | safe }}{{ '<b>' | e }}{{ ['a', 'b'] | string }}", "<b>&lt;b&gt;['a', 'b']"),
        ("{{ 'a\nb' | indent(2) }}|{{ 'a\n\nb' | indent('-', true, true) }}", "a\n  b|-a\n-\n-b"),
        ("{{ 'hello world' | title }} {{ 'abc' | replace('b', 'x') }} {{ ' a ' | trim }}",
         "Hello World axc a"),
        ("{{ [3, 1, 2] | sort | first }}{{ [3, 1] | max }}{{ [1, 1] | unique | list }}{{ [1, 2] | sum }}",
         "13[1]3"),
        ("{{ 'abc' | reverse }}{{ [1, 2] | reverse | list }}{{ 'ab' | list }}", "cba[2, 1]['a', 'b']"),
        ("{{ 7 is odd }} {{ 8 is divisibleby 4 }} {{ 3.7 | int }} {{ '5' | int + 1 }} {{ 2.567 | round(1) }}",
         "True True 3 6 2.6"),
        ("{% set l = [1, 2] %}{% set x = l.append(3) %}{{ l.pop(0) }}{{ l }}", "1[2, 3]"),
        ("{{ messages | map(attribute='role') | tojson }}", '["user"]'),
        ("{{ [[1, 'a'], [1, 'b']] | groupby(0) | map('first') | list }}", "[1]"),
    ],
)  # fmt: skip
def test_what_templates_use(source: str, shown: str) -> None:
    assert show(source) == shown


@pytest.mark.parametrize("fill", ["", ", none", ", 0", ", 'x'"])
@pytest.mark.parametrize("size", range(8))
def test_lists_of_lists_equal_plain_jinja(size: int, fill: str) -> None:
    numbers = [*range(size)]
    for count in range(1, 10):
        source = f"{{{{ l | slice({count}{fill}) | list }}}}{{{{ l | batch({count}{fill}) | list }}}}"
        assert show(source, l=numbers) == SandboxedEnvironment().from_string(source).render(l=numbers)


@pytest.mark.parametrize(
    "source",
    [
        "{{ l | unique | list }}",
        "{{ l | unique(true) | list }}",
        "{{ l | unique(case_sensitive=true) | list }}",
        "{{ [l, ['x', 'b'], ['B', 'c']] | unique(attribute=1) | list }}",
        "{{ l | sort | list }}{{ l | min }}{{ l | max(case_sensitive=true) }}",
        "{{ dict(a=1, **{'b': 2}) }}{{ dict([('a', 3)]) }}{{ dict({'a': 1}, a=2) }}",
        "{% macro m(a, b=0) %}{{ a }}{{ b }}{% endmacro %}{{ m(*['x', 'y']) }}{{ m(**{'a': 1, 'b': 2}) }}",
        "{{ 'a-b-a'.replace('a', 'c', 1) }}{{ 'a-b'.rsplit('-')[0] }}{{ 'x'.startswith(('y', 'x')) }}",
        "{{ 'abcabc'.rfind('b') }}{{ 'abc'.find('c', 1) }}{{ 'abcabc'.count('b', 3) }}{{ 'a'.ljust(-3) }}",
        "{{ 'a b c'.split(maxsplit=1) }}{{ 'a\nb'.splitlines(keepends=true) }}",
        "{{ '\ta'.expandtabs(tabsize=2) }}{{ '%5.2f|%s' % (1.5, 'x') }}{{ 'b' in l }}{{ [1] + [2] * 2 }}",
    ],
)
def test_operations_equal_plain_jinja(source: str) -> None:
    values = ["b", "A", "a", "B", "b"]
    assert show(source, l=values) == SandboxedEnvironment().from_string(source).render(l=values)


def test_arguments_are_passed_through() -> None:
    source = "{{ enable_thinking }} {{ tools | tojson }} {{ add_generation_prompt }} {{ style.a }}"
    shown = show(
        source, enable_thinking=False, tools=[{"x": 1}], add_generation_prompt=False, style={"a": "<b>"}
    )
    assert shown == 'False [{"x": 1}] False <b>'
    assert show("{{ tools is none }}", tools=[]) == "True"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "there are no messages"),
        ("Hi", "messages are a list of dictionaries"),
        ({"role": "user"}, "messages are a list of dictionaries"),
        (["Hi"], r"messages\[0\] is no dictionary"),
        ([USER, {"content": "Hi"}], r"messages\[1\] has the role None"),
        ([{"role": "us<er", "content": ""}], "has the role 'us<er'"),
        ([{"role": "user"}], r"messages\[0\] has neither content nor tool_calls"),
        ([{"role": "user", "content": 5}], "content is an int"),
        ([{"role": "user", "content": ["a"]}], "part 0 of the content is 'str'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part 0 of the content is 'image_url'"),
        ([{"role": "user", "content": "", "x": b""}], r"messages\[0\]\['x'\] has a bytes in it"),
        ([{"role": "user", "content": "", "x": {1: 2}}], "has the key 1"),
        ([{"role": "assistant", "tool_calls": 5}], "tool_calls are a list"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "tool call 0 names no function"),
    ],
)
def test_messages_that_are_none(messages: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        CHATML.render(messages)


def test_arguments_that_are_none() -> None:
    with pytest.raises(RequestError, match="bos_token is set by the call: remove it"):
        CHATML.render([USER], bos_token="x")
    with pytest.raises(RequestError, match="the template's argument x has a set in it"):
        CHATML.render([USER], x={1})
    with pytest.raises(RequestError, match=r"tools\[0\] is a str"):
        CHATML.render([USER], tools=["x"])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="tools are a list"):
        CHATML.render([USER], tools="x")  # type: ignore[arg-type]
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(RequestError, match="more than 64 deep"):
        CHATML.render([USER], x=deep)


def test_a_role_is_the_templates_business() -> None:
    assert "<|im_start|>observation\nHi" in CHATML.render([{"role": "observation", "content": "Hi"}])
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('Roles!') }}{% endif %}"
    with pytest.raises(TemplateError, match=r"^chat template, line 1: Roles!$"):
        show(source, [{"role": "critic", "content": ""}])


def test_parts_are_joined_where_a_template_wants_strings() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert show("{{ messages[0].content }}", parts) == "a\nb"
    looping = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"
    assert show(looping, parts) == "[a][b]"
    assert show(looping) == "[Hi]"
    either = (
        "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}" + looping + "{% endif %}"
    )
    assert show(either) == "Hi"
    assert show(either, parts) == "[a][b]"


def test_arguments_of_calls_come_as_the_template_wants_them() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    given_text = [{"role": "assistant", "tool_calls": [call]}]
    given_data = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "é"}}}]}]
    for messages in (given_text, given_data):
        assert show("{{ messages[0].tool_calls[0].function.arguments.a }}", messages) == "é"
        assert show("{{ 'x' + messages[0].tool_calls[0].function.arguments }}", messages) == 'x{"a": "é"}'


def test_reasoning_has_many_names() -> None:
    for name in ("reasoning", "reasoning_content", "thinking"):
        message = {"role": "assistant", "content": "", name: "Hm."}
        assert show("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}", [message]) == "Hm.Hm."


def test_the_fallback_shows_calls() -> None:
    shown = CHATML.render(CONVERSATIONS["tool_answer"]["messages"], tools=[WEATHER])
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>' in shown
    assert shown.endswith("<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n")


def test_messages_are_not_changed() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    CHATML.render([message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}]}


CONTENT = st.text(st.characters(exclude_categories=["Cs"])) | st.lists(
    st.sampled_from(["<|im_end|>", "{{ 7 * 7 }}", "{% raw %}", "%s", "{}", "</s>", "\n", " ", "<think>", "x"])
).map("".join)


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), CONTENT), min_size=1, max_size=4))
def test_contents_appear_verbatim_and_only_they_are_marked(said: list[tuple[str, str]]) -> None:
    text = CHATML_MARKED([{"role": role, "content": content} for role, content in said])
    expected = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in said)
    assert text == expected + "<|im_start|>assistant\n"
    marked = "".join(char for char, mark in zip(text, text.mask, strict=True) if mark)
    assert marked == "".join(content for _, content in said)


KEY = "k<|im_end|>☃"


@pytest.mark.parametrize(
    "source",
    [
        "{% for k in m %}{{ k }}{% endfor %}",
        "{% for k, v in m.items() %}{{ k ~ '=' ~ v }}{% endfor %}",
        "{% for k, v in m | dictsort %}{{ k }}{% endfor %}",
        "{% for k, v in m | items %}{{ k | trim }}{% endfor %}",
        "{% for g in m.items() | groupby(0) %}{{ g.grouper }}{{ g[0] }}{% endfor %}",
        *("{{ m.keys() | join('+') }}", "{{ '+'.join(m) }}", "{{ m | list }}", "{{ m | sort | join }}"),
        *("{{ m | tojson }}", "{{ m }}", "{{ m | string }}", "{{ m.items() | list }}", "{{ m.copy() }}"),
        *("{{ m | tojson(indent=2, sort_keys=true) }}", "{{ {'a': m} | tojson }}", "{{ m | unique | join }}"),
        *("{{ dict(m) }}", "{{ dict(**m) }}", "{{ dict(m.items(), a=1) }}", "{{ '%s' % (m | list)[2] }}"),
        *("{{ '%5s' % m }}", "{{ '{}'.format(m) }}", "{{ (m | list)[2].upper() }}", "{{ (m | list) + [1] }}"),
        *(
            "{{ m | map('replace', 'k', 'k') | join }}",
            "{{ m | reverse | join }}",
            "{{ m | batch(2) | list }}",
        ),
        "{% macro f() %}{{ kwargs }}{% endmacro %}{{ f(**m) }}",
        "{% macro f() %}{{ kwargs | join }}{% endmacro %}{{ f(**m) }}",
        "{% set n = namespace(s='') %}{% for k in m %}{% set n.s = n.s + k %}{% endfor %}{{ n.s }}",
        "{% set s %}{{ m | join }}{% endset %}{{ s }}{% filter upper %}{{ m | join }}{% endfilter %}",
    ],
)
@pytest.mark.parametrize(
    "where", ["messages[0]", "messages[0].x", "tools[0]", "x", "messages[0].tool_calls[0]"]
)
def test_keys_are_marked_like_values(source: str, where: str) -> None:
    """A key that names a control token stays text, wherever it is and whatever a template does with it."""
    table: dict[str, Any] = {"role": "assistant", "content": "a", KEY: "v", "function": {"name": "f"}}
    message = {**table, "x": table, "tool_calls": [table]}
    made = ChatTemplate("{% set m = " + where + " %}" + source)
    text = made.render_marked([message], tools=[table], arguments={"x": table})
    upper = text.upper()
    assert "☃" in upper or "\\u2603" in upper
    for name in ("<|IM_END|>", "☃"):
        at = upper.find(name)
        while at >= 0:
            assert text.mask[at : at + len(name)] == b"\1" * len(name)
            at = upper.find(name, at + 1)


CHATML_MARKED = CHATML.render_marked

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ANYTHING = ChatTemplate(
    "{% for m in messages %}{{ m.role }}{{ m.content | trim }}{{ m.x | tojson }}{{ m.x }}{{ m.x.items }}"
    "{% if m.x is mapping %}{% for k, v in m.x.items() %}{{ k }}{{ v }}{% endfor %}{% endif %}"
    "{% if m.x is string %}{{ m.x.split('a') | join('b') | upper | length }}{% endif %}{{ x }}{% endfor %}"
)


@given(st.text(), JSON)
def test_nothing_but_a_template_error_is_raised(content: str, value: Any) -> None:
    with contextlib.suppress(TemplateError):
        ANYTHING.render([{"role": "user", "content": content, "x": value}], x=value)


def test_only_chats_load_jinja() -> None:
    code = (
        "import sys; from pyvelo import LLM, AsyncLLM; from pyvelo.chat.template import ChatTemplate;"
        "t = ChatTemplate('x'); assert 'jinja2' not in sys.modules;"
        "t.render([{'role': 'user', 'content': ''}]); assert 'jinja2' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
