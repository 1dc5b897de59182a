"""Tool calls of a real engine: calls that are required, and what outputs have of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, AsyncLLM, Completion, SamplingParams, StreamPiece
from pyvelo.errors import RequestError
from tests.chat.answers import QWEN, TOOLS
from tests.chat.upstream_templates import folder

from .conftest import MakeModel

TALK = [{"role": "user", "content": "Hello world"}]
PARAMS = SamplingParams(max_tokens=120, temperature=0, seed=1)
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def model(make_model: MakeModel) -> Path:
    return make_model("tiny", "--type", "f32", "--chat-template", str(folder() / f"{QWEN}.jinja"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, n_ctx=2048, n_threads=1, max_num_seqs=4) as opened:
        yield opened


def test_a_named_call(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    output = llm.chat(TALK, PARAMS, tools=TOOLS, tool_choice=NOW)
    assert output.prompt is not None
    assert "weather" in output.prompt  # the prompt has all tools
    sample = output.outputs[0]
    assert sample.finish_reason == "stop", sample.text
    assert {(call.name, call.arguments.replace(" ", "")) for call in output.tool_calls} == {("now", "{}")}
    assert output.text.lstrip().startswith("<tool_call>")
    assert sample.content == ""


def test_content_without_tools(llm: LLM) -> None:
    output = llm.chat(TALK, SamplingParams(max_tokens=4, temperature=0), tools=TOOLS)
    assert output.tool_calls == ()
    assert output.reasoning is None
    assert llm.chat(TALK, SamplingParams(max_tokens=4, temperature=0)).outputs[0].content is None


def check_deltas(pieces: Sequence[StreamPiece], whole: Completion) -> None:
    """The deltas of a stream make the parts of the whole answer."""
    deltas = [delta for piece in pieces for delta in piece.deltas]
    assert "".join(delta.content for delta in deltas) == whole.content
    assert "".join(delta.reasoning for delta in deltas) == (whole.reasoning or "")
    for number, call in enumerate(whole.tool_calls):
        parts = [delta for delta in deltas if delta.index == number]
        assert (parts[0].name, "".join(part.arguments for part in parts)) == (call.name, call.arguments)


@pytest.mark.parametrize("echo", [False, True])
def test_deltas_of_plain_answers_are_their_text(llm: LLM, echo: bool) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, echo=echo)
    pieces = list(llm.chat_stream(TALK, params, chat_template="{{ messages[0].content }}"))
    told = "".join(delta.content for piece in pieces for delta in piece.deltas)
    text = "".join(piece.text for piece in pieces)
    assert text == str(TALK[0]["content"]) * echo + told
    assert told
    assert not any(piece.deltas for piece in llm.stream("Once", params))


def test_streams_and_asyncio(llm: LLM, model: Path) -> None:
    pytest.importorskip("llguidance")
    whole = llm.chat(TALK, PARAMS, tools=TOOLS, tool_choice=NOW)
    pieces = list(llm.chat_stream(TALK, PARAMS, tools=TOOLS, tool_choice=NOW))
    assert "".join(piece.text for piece in pieces) == whole.text
    check_deltas(pieces, whole.outputs[0])

    async def streamed() -> list[StreamPiece]:
        async with AsyncLLM(model, n_ctx=2048, n_threads=1) as other:
            asked = other.chat_stream(TALK, PARAMS, tools=TOOLS, tool_choice=NOW)
            return [piece async for piece in asked]

    check_deltas(asyncio.run(streamed()), whole.outputs[0])

    async def main() -> list[Any]:
        async with AsyncLLM(model, n_ctx=2048, n_threads=1, max_num_seqs=4) as other:
            outputs = await other.chat([TALK, TALK], PARAMS, tools=TOOLS, tool_choice=NOW)
            return [[(call.name, call.arguments) for call in output.tool_calls] for output in outputs]

    wanted = [(call.name, call.arguments) for call in whole.tool_calls]
    assert asyncio.run(main()) == [wanted, wanted]


def test_what_a_required_call_cannot_have(llm: LLM) -> None:
    wrong = (
        ({"tools": TOOLS, "tool_choice": "required"}, SamplingParams(regex="x"), "only one"),
        ({"tool_choice": "required"}, None, "needs tools"),
        ({"tools": TOOLS, "tool_choice": "auto", "add_generation_prompt": False}, None, "from its beginning"),
        ({"tools": TOOLS, "tool_choice": "auto", "chat_template": "{{ messages }}"}, None, "of the model"),
        ({"tools": [{"name": "no name"}]}, None, "has the name 'no name'"),
    )
    for options, params, said in wrong:
        with pytest.raises(RequestError, match=said):
            llm.chat(TALK, params, **options)  # type: ignore[call-overload]
