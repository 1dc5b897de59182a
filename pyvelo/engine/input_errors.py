"""Errors of wrong prompts and sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyvelo.errors import OutOfBlocks, RequestError, shown

__all__ = ["no_blocks", "no_prompt", "no_room", "wrong_params"]


def no_prompt(value: Any, items: list[Any] | None, name: str, one: str = "") -> RequestError:
    """Return the error for a value that is neither text nor token ids.

    Args:
        items: of the value; None: it has none.
        one: name of a call that takes one prompt.
    """
    message = f"{name} is {shown(value)}: give a string or a list of token ids"
    messages = [value] if isinstance(value, Mapping) else items or []
    if messages and all(isinstance(item, Mapping) and "role" in item for item in messages):
        message += "; use chat for messages"
    elif one and items and all(isinstance(item, (str, list, tuple)) for item in items):
        message += f"; {one} takes one prompt"
    return RequestError(message)


def wrong_params(value: Any, name: str = "params", *, many: bool = False) -> RequestError:
    """Return the error for a value that is no SamplingParams; `many`: the call takes a list of them, too."""
    or_list = ", or a list with one for each prompt" if many else ""
    return RequestError(f"{name}={shown(value)}: give a SamplingParams{or_list}")


def no_room(n_tokens: int, n_ctx: int, name: str) -> RequestError:
    """Return the error for a prompt or a session of `n_tokens` tokens that leaves no room for an answer."""
    if name.startswith("the session"):
        return RequestError(f"{name} has {n_tokens} tokens, n_ctx={n_ctx}: no room for an answer")
    advice = f"shorten it to {n_ctx - 1} tokens or raise n_ctx" if n_ctx > 1 else "raise n_ctx"
    return RequestError(
        f"{name} has {n_tokens} tokens, but prompt and answer together get n_ctx={n_ctx}: {advice}"
    )


def no_blocks(n_prompt: int, n_answer: int, blocks: str, total: int) -> OutOfBlocks:
    """Return the error for prompt and answer that need more `blocks` than the pool has in `total`."""
    return OutOfBlocks(
        f"{n_prompt} tokens of prompt and up to {n_answer} of answer need {blocks}, the whole pool has "
        f"{total}: ask for fewer tokens or raise kv_cache_bytes"
    )
