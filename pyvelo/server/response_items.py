"""Items and tools of /v1/responses, as a chat has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyvelo.server.contents import as_content, text_parts
from pyvelo.server.errors import refused

__all__ = ["chat_messages", "chat_tools"]

ROLES = ("user", "assistant", "system", "developer")
TEXT = ("input_text", "output_text", "text")
REASONING = ("reasoning_text", "summary_text")


def chat_messages(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the input as messages. Reasoning, text and calls that follow each other are one message.

    Raises: HttpError at an item that cannot be shown.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(given):
        kind = item.get("type", "message")
        add = _ITEMS.get(kind) if isinstance(kind, str) else None
        if add is None:
            known = ", ".join(_ITEMS)
            raise refused(
                "input", f"input[{number}].type={str(kind)[:64]!r} is not supported: give one of {known}"
            )
        add(messages, item, f"input[{number}]")
    return messages


def _message(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise refused("input", f"{where}.role={str(role)[:64]!r}: give {', '.join(ROLES)}")
    content = as_content(text_parts(item.get("content"), TEXT, f"{where}.content", "input"))
    if role == "assistant":
        _assistant(messages, ("content", "tool_calls"))["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _reasoning(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Append reasoning; of an item without its text, the summary."""
    name = "content" if item.get("content") else "summary"
    parts = text_parts(item.get(name) or [], REASONING, f"{where}.{name}", "input")
    if parts:
        turn = _assistant(messages, ("content", "reasoning_content", "tool_calls"))
        turn["reasoning_content"] = "\n".join(part["text"] for part in parts)


def _call(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    function = {name: _string(item, name, where) for name in ("name", "arguments")}
    call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
    _assistant(messages, ()).setdefault("tool_calls", []).append(call)


def _output(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    call = _string(item, "call_id", where)
    content = as_content(text_parts(item.get("output"), TEXT, f"{where}.output", "input"))
    messages.append({"role": "tool", "tool_call_id": call, "content": content})


def _assistant(messages: list[dict[str, Any]], without: Sequence[str]) -> dict[str, Any]:
    """Return the last message if it is the assistant's and has none of these fields, else a new one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in without):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    found = item.get(name)
    if not isinstance(found, str):
        raise refused("input", f"{where}.{name} must be a string")
    return found


_ITEMS: dict[str, Callable[[list[dict[str, Any]], Mapping[str, Any], str], None]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _output,
}


def chat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the functions of a request; raise HttpError at a tool that OpenAI's servers run."""
    found = []
    for number, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            kind = str(tool.get("type"))[:64]
            raise refused("tools", f"tools[{number}].type={kind!r} is not supported: give function")
        names = ("name", "description", "parameters")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found or None
