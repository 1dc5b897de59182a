"""Conversations and tools of Anthropic's clients, as a chat has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from pyvelo.server.contents import Part, as_content, text_part, text_parts, with_names
from pyvelo.server.errors import refused

__all__ = ["AnthropicMessage", "chat_messages", "chat_tools", "tool_choice"]

ROLES = ("user", "assistant", "system")
TEXT = ("text",)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicMessage(Struct, kw_only=True):
    role: str
    content: str | list[dict[str, Any]]


def chat_messages(
    system: str | list[dict[str, Any]] | None, messages: Sequence[AnthropicMessage]
) -> list[dict[str, Any]]:
    """Return the conversation. Messages of the same role are one turn; the result of a tool is its own.

    Raises: HttpError at content that cannot be shown.
    """
    turns = _Turns()
    if system:
        turns.of("system")["content"] = text_parts(system, TEXT, "system", "system")
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role not in ROLES:
            raise refused("messages", f"{where}.role={message.role[:64]!r}: give user or assistant")
        if not message.content:
            turns.of(message.role)
        elif isinstance(message.content, str):
            turns.of(message.role)["content"] += text_parts(message.content, TEXT, where, "messages")
        else:
            for place, block in enumerate(message.content):
                turns.add(message.role, block, f"{where}.content[{place}]")
    for each in turns.found:
        each["content"] = as_content(each["content"])
        if "reasoning_content" in each:
            each["reasoning_content"] = "".join(each["reasoning_content"])
    return with_names(turns.found)


class _Turns:
    """Messages of a chat, made of blocks."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def of(self, role: str) -> dict[str, Any]:
        """Return the last message if it has this role, else a new one."""
        if not self.found or self.found[-1]["role"] != role:
            self.found.append({"role": role, "content": []})
        return self.found[-1]

    def add(self, role: str, block: Mapping[str, Any], where: str) -> None:
        """Append a block to the conversation."""
        kind = block.get("type")
        if kind == "thinking" and role == "assistant":
            self.of(role).setdefault("reasoning_content", []).append(_string(block, "thinking", where))
        elif kind == "redacted_thinking":
            self.of(role)
        elif kind == "tool_use" and role == "assistant":
            self.of(role).setdefault("tool_calls", []).append(self._call(block, where))
        elif kind == "tool_result" and role == "user":
            self.found.append(self._result(block, where))
        else:
            self.of(role)["content"].append(text_part(block, TEXT, where, "messages"))

    def _call(self, block: Mapping[str, Any], where: str) -> dict[str, Any]:
        name, given = _string(block, "name", where), block.get("input")
        if not isinstance(given, dict):
            raise refused("messages", f"{where}.input must be an object")
        return {
            "id": _string(block, "id", where),
            "type": "function",
            "function": {"name": name, "arguments": given},
        }

    def _result(self, block: Mapping[str, Any], where: str) -> dict[str, Any]:
        call, content = _string(block, "tool_use_id", where), block.get("content")
        parts: list[Part] = []
        if content is not None:
            parts = text_parts(content, TEXT, f"{where}.content", "messages")
        return {"role": "tool", "tool_call_id": call, "content": parts}


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    found = block.get(name)
    if not isinstance(found, str):
        raise refused("messages", f"{where}.{name} must be a string")
    return found


def chat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the functions of a request; raise HttpError at a tool that Anthropic's servers run."""
    found = []
    for number, tool in enumerate(tools or ()):
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise refused(
                "tools",
                f"tools[{number}].type={str(kind)[:64]!r} is not supported: give a name and input_schema",
            )
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        found.append({"type": "function", "function": function})
    return found or None


def tool_choice(given: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """Return the choice as a chat has it, and whether an answer may have several calls."""
    if given is None:
        return None, None
    kind, one = given.get("type"), given.get("disable_parallel_tool_use")
    if one is not None and not isinstance(one, bool):
        raise refused("tool_choice", "tool_choice.disable_parallel_tool_use must be true or false")
    parallel = None if one is None else not one
    if kind == "tool" and isinstance(given.get("name"), str):
        return {"type": "function", "function": {"name": given["name"]}}, parallel
    if not isinstance(kind, str) or kind not in CHOICES:
        raise refused("tool_choice", "tool_choice: give the type auto, any, none, or tool and a name")
    return CHOICES[kind], parallel
