"""Requests for tools: descriptions of functions, the choice among them, the history of their calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyvelo.chat.plain import plain
from pyvelo.errors import RequestError, shown

__all__ = ["CHOICES", "Tools", "check_choice", "history"]

CHOICES = ("auto", "none", "required")
MAX_TOOLS = 512
MAX_NAME = 128
MAX_OPTIONAL = 256
"""Most properties of an object that are not required: the time for a grammar grows with their square."""
MAX_BYTES = 512 << 10
"""Most bytes of the descriptions of all tools, as JSON."""

_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.:/-]{{0,{MAX_NAME - 1}}}")
_MARK = re.compile(r"/(?:no_)?think\b")  # in a content, templates look for these


@dataclass(frozen=True)
class Tools:
    """Functions that an answer may call, and how it must use them.

    functions: JSON schemas in OpenAI's form of the functions that may be called.
    choice: "auto", "none" or "required".
    parallel: one answer may have several calls.
    asked: the caller chose, so a model without tools is an error.
    """

    functions: tuple[dict[str, Any], ...] = ()
    choice: str = "auto"
    parallel: bool = True
    asked: bool = False

    @classmethod
    def of(cls, tools: Any, choice: Any = None, parallel: bool | None = None) -> Tools:
        """Return the checked tools of a request.

        Args:
            tools: descriptions of functions: OpenAI's {"type": "function", "function": {...}}, or the inner
                dictionary alone.
            choice: "auto", "none", "required", or {"type": "function", "function": {"name": ...}} for this
                function alone; None: "auto".
            parallel: None: True.

        Raises:
            RequestError: names the tool and what is wrong.
        """
        if parallel is not None and not isinstance(parallel, bool):
            raise RequestError(f"parallel_tool_calls={shown(parallel)}: give True or False")
        functions = _functions(tools)
        kind, name = check_choice(choice)
        if name is not None:
            functions = tuple(one for one in functions if one["function"]["name"] == name)
            if not functions:
                raise RequestError(f"tool_choice: {shown(name)} is none of the tools")
        elif kind == "required" and not functions:
            raise RequestError("tool_choice='required' needs tools: give at least one")
        asked = choice is not None and bool(functions) and kind != "none"
        return cls(functions, kind, name is None and parallel is not False, asked)


def check_choice(choice: Any) -> tuple[str, str | None]:
    """Return the kind of a `tool_choice`, one of CHOICES, and the name of the function that it names."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str) and choice in CHOICES:
        return choice, None
    if isinstance(choice, Mapping) and choice.get("type", "function") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return "required", name
    raise RequestError(
        f"tool_choice={shown(choice)}: give 'auto', 'none', 'required' or "
        "{'type': 'function', 'function': {'name': '...'}}"
    )


def _functions(tools: Any) -> tuple[dict[str, Any], ...]:
    if tools is None:
        return ()
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError(
            "tools are a list of dictionaries, each with the name and parameters of a function"
        )
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"{len(tools)} tools, the most are {MAX_TOOLS}")
    found = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    names: set[str] = set()
    for index, tool in enumerate(found):
        name = tool["function"]["name"]
        if name in names:
            raise RequestError(f"tools[{index}]: another tool has the name {name}, too")
        names.add(name)
    if len(json.dumps(found)) > MAX_BYTES:
        raise RequestError(f"the descriptions of the tools have more than {MAX_BYTES >> 10} KiB as JSON")
    return tuple(found)


def _function(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} is {shown(tool)}: describe a function by a dictionary")
    function = tool.get("function", tool)
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise RequestError(f"{where} has the type {shown(tool.get('type'))}: only functions can be called")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where} has the name {shown(name)}: a name has up to {MAX_NAME} letters, digits, _ and -"
        )
    where = f"{where}, {name}"
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{where}: description is {shown(description)}: give a string")
    return {
        "type": "function",
        "function": {
            "name": str.__str__(name),
            "description": str.__str__(description or ""),
            "parameters": _parameters(function.get("parameters"), where),
        },
    }


def _parameters(schema: Any, where: str) -> dict[str, Any]:
    """Return a copy of the JSON schema of a function's arguments."""
    if schema is None:
        return {}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise RequestError(f"{where}: parameters are {shown(schema)}: give the JSON schema of an object")
    copy: dict[str, Any] = plain(schema, f"{where}: parameters", str)
    if copy and not isinstance(copy.setdefault("properties", {}), dict):
        raise RequestError(f"{where}: properties are {shown(copy['properties'])}: give a dictionary")
    _complete(copy, where)
    return copy


def _complete(schema: Any, where: str) -> None:
    """Add `items` to arrays without it: upstream's engine finds a method of this name instead.

    Raises: RequestError if an object has too many properties that are not required.
    """
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _complete(part, where)
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
        required = schema.get("required")
        named = set(map(str, required)) if isinstance(required, list) else set()
        optional = len(schema["properties"].keys() - named)
        if optional > MAX_OPTIONAL:
            raise RequestError(
                f"{where}: an object has {optional} properties that are not required: "
                f"the most are {MAX_OPTIONAL}"
            )
    if isinstance(schema, dict) and schema.get("type") == "array":
        schema.setdefault("items", {})


def history(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the roles, calls and marks of a conversation, on which the end of its prompt depends.

    Upstream's prompt is not used. So calls have no arguments, which could be malformed, and conversations of
    the same form have the same plan.
    """
    short = []
    for message in messages:
        kept: dict[str, Any] = {
            "role": str.__str__(message["role"]),
            "content": _text(message.get("content")),
        }
        calls = [call.get("function", call).get("name") for call in message.get("tool_calls") or ()]
        if calls:
            kept["tool_calls"] = [
                {"type": "function", "id": f"call{number:05}", "function": {"name": name, "arguments": "{}"}}
                for number, name in enumerate(calls)
            ]
        if kept["role"] == "tool":
            kept |= {"tool_call_id": "call00000", "name": str(message.get("name") or "tool")[:MAX_NAME]}
        short.append(kept)
    return short


def _text(content: Any) -> str:
    if content is not None and not isinstance(content, str):
        content = "\n".join(part["text"] for part in content)
    return " ".join(["Hi", *_MARK.findall(content)]) if content else ""
