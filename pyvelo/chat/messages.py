"""Checks of conversations, and their conversion to the plain data with marked strings that templates read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pyvelo.chat.marked import theirs
from pyvelo.chat.plain import Parts, plain
from pyvelo.errors import RequestError, shown

__all__ = ["Message", "as_text_arguments", "check_arguments", "check_messages", "check_tools", "join_parts"]

Message = Mapping[str, Any]

# templates may write these names into control tokens, and no control token fits into such a name
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return checked copies of the messages.

    Every string is marked as the user's, also keys; the role is a name and is not marked. Arguments of tool
    calls in JSON are parsed. Reasoning is copied to each of the names that templates use for it.

    Raises:
        RequestError: a message is not valid; the text has its number.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages are a list of dictionaries: [{'role': 'user', 'content': 'Hi'}]")
    if not messages:
        raise RequestError("there are no messages; give at least one")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is no dictionary: give {{'role': 'user', 'content': 'Hi'}}")
    role = message.get("role")
    if not isinstance(role, str) or not _NAME.fullmatch(role):
        raise RequestError(
            f"{where} has the role {shown(role)}: a role is a name such as system, user, assistant or tool"
        )
    checked: dict[str, Any] = {"role": str.__str__(role)}
    for key, value in message.items():
        if not isinstance(key, str):
            raise RequestError(f"{where} has the key {shown(key)}: keys must be strings")
        if key == "content":
            checked["content"] = _check_content(value, where)
        elif key == "tool_calls":
            checked["tool_calls"] = _check_calls(value, where)
        elif key != "role":
            checked[theirs(str.__str__(key))] = plain(value, f"{where}[{shown(key)}]")
    if checked.get("content") is None and "tool_calls" not in checked and not _reasons(checked):
        raise RequestError(f"{where} has neither content nor tool_calls")
    if checked["role"] == "assistant" and checked.get("content") is None:
        checked["content"] = ""  # templates fail without it, or write None
    reasoning = next((checked[key] for key in _REASONING if checked.get(key) is not None), None)
    if reasoning is not None:
        checked.setdefault("reasoning_content", reasoning)
        checked.setdefault("thinking", reasoning)
    return checked


def _reasons(message: dict[str, Any]) -> bool:
    return any(message.get(key) is not None for key in _REASONING)


def _check_content(content: Any, where: str) -> Any:
    if content is None or isinstance(content, str):
        return plain(content, f"{where}['content']")
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise RequestError(f"{where}: content is {_kind(content)}: give a string or a list of parts")
    parts = Parts()
    for index, part in enumerate(content):
        kind: Any = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{where}: part {index} of the content is {shown(kind)}; "
                "only {'type': 'text', 'text': '...'} can be answered"
            )
        parts.append({"type": "text", "text": plain(part["text"], where)})
    return parts


def _kind(value: Any) -> str:
    """Return the name of a value's type with its article."""
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _check_calls(calls: Any, where: str) -> Any:
    if calls is None:
        return None
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{where}: tool_calls are a list of dictionaries, as the model made them")
    checked = []
    for index, call in enumerate(calls):
        copy = plain(call, f"{where}['tool_calls'][{index}]")
        function = copy.get("function", copy)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}: tool call {index} names no function")
        function["arguments"] = _parsed(function.get("arguments", {}), f"{where}: tool call {index}")
        checked.append(copy)
    return checked


def _parsed(arguments: Any, where: str) -> Any:
    """Return the arguments of a tool call as data: JSON is parsed, any other string stays."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return plain(found, where) if isinstance(found, dict) else arguments


def as_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the arguments of tool calls as JSON, for the templates that need it."""
    changed = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            text = function["arguments"]
            if not isinstance(text, str):
                text = plain(json.dumps(text, ensure_ascii=False), "arguments")
            function = {**function, "arguments": text}
            calls.append({**call, "function": function} if "function" in call else function)
        changed.append({**message, "tool_calls": calls} if calls else message)
    return changed


def join_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each content as one string; parts become lines."""
    return [
        {**message, "content": message["content"].text}
        if isinstance(message.get("content"), Parts)
        else message
        for message in messages
    ]


def check_tools(tools: Any) -> list[Any] | None:
    """Return copies of the descriptions of tools; RequestError if they are not valid."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError(
            "tools are a list of dictionaries, each with the name and parameters of a function"
        )
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{index}] is {_kind(tool)}: describe it by a dictionary")
    return [plain(tool, f"tools[{index}]") for index, tool in enumerate(tools)] or None


def check_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of template arguments; a value that is a single name is not marked, as a role."""
    if not isinstance(arguments, Mapping):
        raise RequestError(f"template_arguments={shown(arguments)}: give a dictionary of names and values")
    checked: dict[str, Any] = {}
    for name, value in arguments.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise RequestError(f"{shown(name)} is no name for an argument of a chat template")
        if name in _RESERVED:
            raise RequestError(f"{name} is set by the call: remove it")
        named = isinstance(value, str) and _NAME.fullmatch(value)
        checked[name] = str.__str__(value) if named else plain(value, f"the template's argument {name}")
    return checked
