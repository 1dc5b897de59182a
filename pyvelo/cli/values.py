"""Option values that are more than a number."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyvelo.config import MAX_LORA_SCALE
from pyvelo.errors import ConfigError, RequestError, shown

if TYPE_CHECKING:
    from pyvelo.chat.conversation import ChatOptions

__all__ = [
    "chat_options",
    "count",
    "decode_rate",
    "parse_argument",
    "parse_gpu_layers",
    "parse_kv_type_option",
    "parse_lora",
    "parse_names",
    "parse_numbers",
    "parse_reasoning",
    "parse_size",
    "parse_some_size",
    "parse_system",
    "parse_template_arguments",
    "read_template",
    "show_bytes",
]

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)


def parse_argument(text: str, name: str) -> str:
    """Return a text of the command line, read as UTF-8 in any locale; ConfigError if it is none."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        raise ConfigError(f"{name} {shown(text)} is not UTF-8 text") from None


def parse_size(text: str) -> int:
    """Parse bytes such as `1048576`, `512M` or `1.5GiB`; K, M, G, T are powers of 1024. Else ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{shown(text)} is no size: give bytes, or a number with K, M, G or T, such as 512M"
        )
    return int(Fraction(match[1]) * (1 << _UNITS[match[2].upper()]))


def parse_some_size(text: str) -> int:
    """Parse bytes as `parse_size`, at least 1."""
    size = parse_size(text)
    if size < 1:
        raise ConfigError(f"{shown(text)} is no size: give 1 byte or more, such as 10G")
    return size


def parse_kv_type_option(text: str) -> str | tuple[str, str]:
    """Parse `q8_0`, or `q8_0,q4_0` for K and V; the engine checks that the types exist."""
    names = [name.strip() for name in text.split(",")]
    match names:
        case [both] if both:
            return both
        case [k, v] if k and v:
            return (k, v)
        case _:
            raise ConfigError(
                f"--kv-type {shown(text)}: give one type, or two with a comma between them (K,V)"
            )


def parse_gpu_layers(text: str | int) -> int | str:
    """Parse a number of layers, or `auto`; else ConfigError."""
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise ConfigError(f"--n-gpu-layers {shown(text)}: give a number, -1 for all, or auto") from None


def parse_lora(text: str) -> tuple[str, float]:
    """Parse `FILE`, or `FILE:SCALE`; else ConfigError. A file with this whole name exists: its scale is 1."""
    if not text:
        raise ConfigError("--lora '': give FILE or FILE:SCALE")
    path, colon, scale = text.rpartition(":")
    if colon and path and not os.path.exists(text):
        number = _number(scale)
        if number is not None and abs(number) <= MAX_LORA_SCALE:
            return path, number
        if number is not None or os.path.exists(path):  # else a colon in a name, or a drive of Windows
            raise ConfigError(
                f"--lora {shown(text)}: the scale {shown(scale)} is no number up to 1e6: give FILE[:SCALE]"
            )
    return text, 1.0


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def parse_numbers(text: str) -> list[int]:
    """Parse numbers such as `0,4096`; else ConfigError."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{shown(text)}: give whole numbers with commas between them, such as 0,4096"
        ) from None


def parse_names(text: str) -> list[str]:
    """Parse names such as `f16,q8_0`; else ConfigError."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"{shown(text)}: give names with commas between them, such as f16,q8_0")
    return names


def show_bytes(n_bytes: int) -> str:
    """Return a size as text: `1.2 GiB`."""
    size = float(n_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def count(n: int, noun: str) -> str:
    """Return a number with its noun: `1 turn`, `2,000 turns`."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def decode_rate(n_tokens: int, first: float, total: float) -> float:
    """Return the tokens per second after the first; 0 without a second one.

    first, total: seconds from the start of a request to its first token and to its end.
    """
    span = total - first
    return (n_tokens - 1) / span if n_tokens > 1 and span > 0 else 0.0


def parse_system(text: str | None) -> str | None:
    """Return the system message of an option; None: there is none. Else ConfigError."""
    return None if text is None else parse_argument(text, "the system message")


def parse_template_arguments(given: Iterable[str]) -> dict[str, Any]:
    """Parse `NAME=VALUE` of each; a value is JSON, else text. ConfigError for another form."""
    found = {}
    for each in given:
        name, equals, value = parse_argument(each, "--template-arg").partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--template-arg {shown(each)}: give NAME=VALUE, such as enable_thinking=false")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    if found:
        from pyvelo.chat.messages import check_arguments

        try:
            check_arguments(found)
        except RequestError as error:
            raise ConfigError(f"--template-arg {error}") from None
    return found


def chat_options(template: str | None, arguments: Iterable[str] | None, reasoning: str | None) -> ChatOptions:
    """Return the arguments of `LLM.chat` for options of a command."""
    given = parse_template_arguments(arguments or ())
    if reasoning == "off":
        given.setdefault("enable_thinking", False)
    return {"chat_template": read_template(template), "template_arguments": given or None}


def parse_reasoning(given: str | None, no_think: bool) -> str | None:
    """Return "show", "hide" or "off"; None if nothing is given. Else ConfigError."""
    if no_think and given not in (None, "off"):
        raise ConfigError(f"--no-think is --reasoning off: leave --reasoning {shown(given or '')} out")
    if given not in (None, "show", "hide", "off"):
        raise ConfigError(f"--reasoning {shown(given)}: give show, hide or off")
    return "off" if no_think else given


def read_template(given: str | None) -> str | None:
    """Return the source of a chat template; ConfigError or TemplateError if its file is none."""
    from pyvelo.chat.template import BUILT_IN, ChatTemplate

    if given is None or given in BUILT_IN:
        return given and BUILT_IN[given]
    try:
        source = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        names = ", ".join(BUILT_IN)
        raise ConfigError(
            f"--chat-template={given} cannot be read ({reason}): give a file of a Jinja template, or a "
            f"built-in one: {names}"
        ) from None
    ChatTemplate(source, name=f"--chat-template={given}").check()
    return source
