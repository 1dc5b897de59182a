"""Contents of messages: text, or parts of text by the names of each endpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pyvelo.server.errors import refused

__all__ = ["as_content", "text_part", "text_parts", "thinking_arguments", "with_names"]

Part = dict[str, Any]


def text_parts(content: Any, kinds: Sequence[str], where: str, param: str) -> list[Part]:
    """Return a content as parts of text.

    Args:
        kinds: types that a part of text has; the first is named in errors.
        where: place in the field `param`.

    Raises: HttpError at anything else.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise refused(param, f"{where} must be a string or a list of parts")
    return [text_part(part, kinds, f"{where}[{number}]", param) for number, part in enumerate(content)]


def text_part(part: Any, kinds: Sequence[str], where: str, param: str) -> Part:
    """Return a part of text, as `text_parts`."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds:
        raise refused(param, f"{where}.type={str(kind)[:64]!r} is not supported: give {kinds[0]}")
    if not isinstance(part.get("text"), str):
        raise refused(param, f"{where}.text must be a string")
    return {"type": "text", "text": part["text"]}


def as_content(parts: Collection[Part]) -> str | list[Part]:
    """Return parts as templates read them: some know strings only."""
    return [*parts] if len(parts) > 1 else "".join(part["text"] for part in parts)


def with_names(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which the results of calls have the functions' names, which some templates show."""
    named = []
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        call = message.get("tool_call_id")
        named.append({**message, "name": names[call]} if call in names else dict(message))
    return named


def thinking_arguments(thinks: bool) -> dict[str, bool]:
    """Return the variables by which templates switch reasoning on and off."""
    return {"enable_thinking": thinks, "thinking": thinks}
