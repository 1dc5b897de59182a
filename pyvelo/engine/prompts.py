"""What people give as prompts or texts, as lists of token ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pyvelo.errors import RequestError, shown

if TYPE_CHECKING:
    from pyvelo.native import Model

__all__ = ["Prompt", "items_of", "listed", "tokens_of"]

Prompt = str | Sequence[int]


def tokens_of(
    model: Model, prompt: Prompt, *, add_special: bool = True, name: str = "the prompt"
) -> Sequence[int]:
    """Token ids of a prompt; RequestError, in which it has that name, where it is none, or empty."""
    n_vocab = model.vocab.n_tokens
    if isinstance(prompt, str):
        tokens: list[int] | None = model.tokenize(prompt, add_special=add_special)
    else:
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError:
            tokens = None
        if tokens is None or isinstance(prompt, (bytes, Mapping)):
            raise RequestError(f"{name} must be a string or a list of token ids")
        wrong = next((token for token in tokens if not 0 <= token < n_vocab), None)
        if wrong is not None:
            raise RequestError(f"{name}: token {shown(wrong)} does not exist: ids go from 0 to {n_vocab - 1}")
    if not tokens:
        raise RequestError(f"{name} has no tokens; give at least one")
    return tokens


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list: a string is one prompt, and so are numbers."""
    if isinstance(prompts, str):
        return [prompts]
    items = None if isinstance(prompts, (bytes, Mapping)) else items_of(prompts)
    if items is None:
        raise RequestError(f"{shown(prompts)} is no prompt: give a string, token ids, or a list of either")
    one = bool(items) and not any(isinstance(item, str) or hasattr(item, "__len__") for item in items)
    return [cast("list[int]", items)] if one else cast("list[Prompt]", items)


def items_of(value: Any) -> list[Any] | None:
    """What is in it, None where it has no items: an array without an axis is iterable by its type alone."""
    try:
        return list(value)
    except TypeError:
        return None
