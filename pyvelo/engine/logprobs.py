"""How likely the tokens are that a step has drawn, for those requests that want to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pyvelo.engine.request import Request
from pyvelo.outputs import TokenLogprob

if TYPE_CHECKING:
    from pyvelo.native import Context

__all__ = ["logprobs_of"]


def logprobs_of(
    context: Context, rows: NDArray[np.int32], tokens: NDArray[np.int32], requests: Sequence[Request]
) -> dict[int, TokenLogprob]:
    """By id of the request. rows, tokens: int32 [n], which logits, what was drawn from them; -1: nothing."""
    wanted = [
        (place, request, request.n_logprobs)
        for place, request in enumerate(requests)
        if request.n_logprobs is not None and tokens[place] >= 0
    ]
    if not wanted:
        return {}
    places = [place for place, _, _ in wanted]
    most = max(n for _, _, n in wanted)
    chosen, top_tokens, top = context.logprobs(rows[places], tokens[places], most)
    named = zip(wanted, chosen.tolist(), top_tokens.tolist(), top.tolist(), strict=True)
    return {
        id(request): TokenLogprob(int(tokens[place]), logprob, _named(ids[:n], logprobs[:n]))
        for (place, request, n), logprob, ids, logprobs in named
    }


def _named(ids: list[int], logprobs: list[float]) -> tuple[tuple[int, float], ...]:
    """Without those that stand for nothing, as where the model gives few tokens a chance."""
    return tuple((token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if token >= 0)
