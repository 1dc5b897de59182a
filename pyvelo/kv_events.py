"""Settings of KV events."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Any, Literal, get_args

from pyvelo.errors import ConfigError, shown
from pyvelo.hosts import address_of

__all__ = ["EventEncoding", "KVEvents"]

EventEncoding = Literal["map", "array"]


@dataclass(frozen=True)
class KVEvents:
    """Events of cached blocks over ZMQ, for routers. They contain the token ids of prompts and answers.

    endpoint: address to publish at, such as tcp://127.0.0.1:5557 or ipc:///run/events; port *: a free one.
        A socket at the path is replaced if nothing listens at it.
    replay: address for requests of past events; None: none.
    topic: of the messages, such as kv@NAME@MODEL for llm-d.
    encoding: "map" as vLLM since 0.24, or "array" as vLLM before.

    Raises:
        ConfigError: a setting is wrong.
    """

    endpoint: str
    replay: str | None = None
    topic: str = ""
    encoding: EventEncoding = "map"

    def __post_init__(self) -> None:
        _check_endpoint("endpoint", self.endpoint)
        if self.replay is not None:
            _check_endpoint("replay", self.replay)
        if self.replay == self.endpoint and not self.endpoint.endswith((":*", ":0")):
            raise ConfigError(f"kv_events: {self.endpoint} is also the address of the replay: give two")
        if not isinstance(self.topic, str) or not self.topic.isprintable() or len(self.topic) > 256:
            raise ConfigError(f"topic={shown(self.topic)} of kv_events: give up to 256 printable characters")
        if not isinstance(self.encoding, str) or self.encoding not in get_args(EventEncoding):
            choices = " or ".join(map(repr, get_args(EventEncoding)))
            raise ConfigError(f"encoding={shown(self.encoding)} of kv_events: give {choices}")


def _check_endpoint(name: str, address: Any) -> None:
    """Raise ConfigError unless ZMQ can be asked to bind the address."""
    text = address if isinstance(address, str) and address.isprintable() else ""
    scheme, _, place = text.partition("://")
    host, _, port = place.rpartition(":")
    free_or_number = port == "*" or (port.isascii() and port.isdigit() and int(port) < 1 << 16)
    if not (place if scheme == "ipc" else scheme == "tcp" and _is_host(host) and free_or_number):
        raise ConfigError(
            f"{name}={shown(address)} of kv_events: give tcp://ADDRESS:PORT, such as tcp://127.0.0.1:5557 or "
            f"tcp://[::1]:5557, or ipc://PATH"
        )


def _is_host(text: str) -> bool:
    """Return whether a text may be *, a name, or an address: an IPv6 one has brackets."""
    if text.startswith("[") and text.endswith("]"):
        return isinstance(address_of(text), IPv6Address)
    looks_like_numbers = text.replace(".", "").isdigit()
    return bool(text) and ":" not in text and (not looks_like_numbers or address_of(text) is not None)
