"""What the scripts that write models share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gguf

__all__ = ["add_metadata"]


def add_metadata(writer: gguf.GGUFWriter, keys: Mapping[str, Any]) -> None:
    """Writes each key with the type that its value has in a model's file; what is no scalar is an array."""
    for key, value in keys.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
