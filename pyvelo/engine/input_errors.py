"""Errors of wrong prompts, sampling parameters and ids of requests, and the abort by id."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

from pyvelo.engine.request import ParentRequest, Sequence
from pyvelo.errors import OutOfBlocks, PromptTooLong, RequestError, shown
from pyvelo.sampling import SamplingParams

if TYPE_CHECKING:
    from pyvelo.native import Adapter

__all__ = [
    "FindLora",
    "abort_requests",
    "check_continuation",
    "check_id",
    "find_adapter",
    "no_blocks",
    "no_lora",
    "no_prompt",
    "no_room",
    "wrong_params",
]

FindLora: TypeAlias = "Callable[[str | None], Adapter | None]"
"""Function that returns the adapter of a name, as `LoadedLoras.find`."""

MAX_ID = 256
"""Characters of an id."""


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


def no_room(n_tokens: int, n_ctx: int, n_trained: int, name: str) -> PromptTooLong:
    """Return the error for a prompt or a session of `n_tokens` tokens that leaves no room for an answer.

    n_trained: the context that the model was trained on.
    """
    if name.startswith("the session"):
        return PromptTooLong(f"{name} has {n_tokens} tokens, n_ctx={n_ctx}: no room for an answer")
    more = "raise n_ctx" if n_ctx < n_trained else "take a model that was trained on more"
    advice = f"shorten it to {n_ctx - 1} tokens or {more}" if n_ctx > 1 else more
    return PromptTooLong(
        f"{name} has {n_tokens} tokens, but prompt and answer together get n_ctx={n_ctx}: {advice}"
    )


def no_blocks(n_prompt: int, n_answer: int, blocks: str, total: int) -> OutOfBlocks:
    """Return the error for prompt and answer that need more `blocks` than the pool has in `total`."""
    return OutOfBlocks(
        f"{n_prompt} tokens of prompt and up to {n_answer} of answer need {blocks}, the whole pool has "
        f"{total}: ask for fewer tokens or raise kv_cache_bytes"
    )


def no_lora(name: object, names: Iterable[str]) -> RequestError:
    """Return the error for the name of an adapter that is not among the loaded `names`."""
    known = ", ".join(map(shown, names))
    return RequestError(f"lora={shown(name)}: {f'there are {known}' if known else 'no adapter is loaded'}")


def find_adapter(find: FindLora | None, name: str | None) -> Adapter | None:
    """Return the adapter of this name; find None: no adapter was ever loaded."""
    if find is not None:
        return find(name)
    if name is not None and name != "":
        raise no_lora(name, ())
    return None


def check_continuation(sequence: Sequence, params: SamplingParams, find: FindLora | None) -> None:
    """Raise RequestError if a session's sequence cannot continue with these parameters."""
    if not sequence.tokens:
        raise RequestError("the session has no tokens; append at least one")
    for name, n in (("n", params.n), ("best_of", params.best_of or 1)):
        if n > 1:
            raise RequestError(f"{name}={n}: a session has one sample: fork it for others")
    if params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs: a session computes no token twice; use LLM.generate")
    if params.cache_salt and params.cache_salt != sequence.salt:
        raise RequestError("cache_salt: a session keeps its own: give it to `session`, not to an answer")
    adapter = sequence.adapter
    if params.lora is not None and find_adapter(find, params.lora) is not adapter:
        raise RequestError("lora: a session keeps its own: give it to `session`, not to an answer")
    if adapter is not None and adapter.closed:
        raise RequestError(f"the session's adapter {shown(adapter.name)} was unloaded")


def check_id(request_id: object) -> None:
    """Raise RequestError if this is not a string of 1 to 256 characters."""
    if not isinstance(request_id, str) or not 1 <= len(request_id) <= MAX_ID:
        raise RequestError(f"request_id={shown(request_id)}: give a string of 1 to {MAX_ID} characters")


def abort_requests(parents: set[ref[ParentRequest]], request_ids: str | Iterable[str]) -> bool:
    """Mark the requests of these ids, so that the core ends them; return whether there are any.

    Other threads may add to `parents` meanwhile: it is copied by one call of C.

    Raises:
        RequestError: an id is not a string of 1 to 256 characters.
    """
    try:
        ids: list[Any] = [request_ids] if isinstance(request_ids, (str, bytes)) else list(request_ids)
    except TypeError:
        ids = [request_ids]
    for request_id in ids:
        check_id(request_id)
    wanted = set(ids)
    found = [parent for each in parents.copy() if (parent := each()) is not None]
    named = [parent for parent in found if {parent.request_id, parent.batch_id} & wanted]
    for parent in named:
        parent.aborted = True
    return bool(named)
