"""Sources of the longest size are read in a moment; an expression that tries all splits would hang."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.chat.messages import check_messages
from pyvelo.chat.tools import MAX_OPTIONAL, Tools
from pyvelo.demo import DEMO_MODEL
from pyvelo.errors import RequestError
from pyvelo.grammar import compiler
from pyvelo.grammar.limits import check_lark
from pyvelo.grammar.matcher import error_of
from pyvelo.sampling import MAX_CHARACTERS

N = MAX_CHARACTERS


@pytest.mark.parametrize("comment", ["#", "//"])
@pytest.mark.parametrize("end", ["\nroot ::= x", '\nstart: "a"', ""])
def test_a_long_line_of_comment_marks(comment: str, end: str) -> None:
    source = comment * (N // len(comment)) + end
    assert bool(compiler._GBNF.match(source)) == ("::=" in end)
    assert bool(compiler._LARK.search(source)) == ("start" in end)


def test_many_comments() -> None:
    assert compiler._GBNF.match("# a\n// b\r\n \n" * (N // 12) + "root ::= x")


@pytest.mark.parametrize("space", ["\n", " ", "\t", "\n "])
def test_long_spaces(space: str) -> None:
    source = space * (N // len(space))
    assert not compiler._LARK.search(source + "x")
    assert not compiler._GBNF.match(source + "x")
    assert compiler._LARK.search(source + "\nstart: x")


@pytest.mark.parametrize("text", ["A" * N, "_A0-" * (N // 4), '"' + "ACGT" * (N // 4) + '"', "A[" * (N // 2)])
def test_long_names_of_terminals(text: str) -> None:
    check_lark(f'start: "a"\n{text}')


@pytest.mark.parametrize("quoted", [" " * N + "(", "(" * N, "<" * N])
def test_an_error_that_quotes_a_long_source(quoted: str) -> None:
    found = error_of(SimpleNamespace(get_error=lambda: f"{quoted} is wrong <state>secret"))
    assert "secret" not in found
    assert len(found) < 1000


@pytest.mark.parametrize("n", [MAX_OPTIONAL, MAX_OPTIONAL + 1])
@pytest.mark.parametrize("deep", [False, True])
def test_properties_that_are_not_required(n: int, deep: bool) -> None:
    many = {"type": "object", "properties": {f"p{i}": {} for i in range(n + 1)}, "required": ["p0"]}
    schema = {"type": "object", "properties": {"list": {"type": "array", "items": many}}} if deep else many
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    if n <= MAX_OPTIONAL:
        assert Tools.of(tools).functions
    else:
        with pytest.raises(RequestError, match=f"{n} properties that are not required"):
            Tools.of(tools)


def test_a_text_that_the_output_cannot_continue() -> None:
    """The first line is read like any input, because a caller may write it, too."""
    with LLM(DEMO_MODEL, n_ctx=64, kv_cache_bytes=1 << 20) as llm:
        for parts in (
            "[-1]",
            "[null]",
            '[{"a": 1}]',
            '["\\ud800"]',
            "[99999999999]",
            "[[]]",
            '["b"]',
            "[1e99]",
        ):
            params = SamplingParams(grammar=f'# after {parts}\nroot ::= "a"', max_tokens=2)
            with pytest.raises(RequestError):
                llm.generate("x", params)
        assert llm.generate("x", SamplingParams(grammar='# after ["a"]\nroot ::= "a" "b"'))[0].text == "b"


@pytest.mark.parametrize("missing", [{}, {"content": None}])
def test_a_call_without_content_has_an_empty_one(missing: dict[str, None]) -> None:
    """OpenAI's clients send null beside tool calls; templates fail, or write None."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "tool_calls": [call], **missing}
    assert check_messages([message])[0]["content"] == ""
