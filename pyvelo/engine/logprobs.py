"""How likely tokens are, those that a step has drawn and those of prompts, for requests that want to know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pyvelo.engine.batch import Scored
from pyvelo.engine.request import Request
from pyvelo.outputs import TokenLogprob

if TYPE_CHECKING:
    from pyvelo.native import Context

__all__ = ["logprobs_of", "score_prompts"]


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


def score_prompts(
    context: Context, pieces: Iterable[Scored], fail: Callable[[list[Request], Exception], None]
) -> None:
    """Notes how likely the tokens of prompts were; `fail` is told whose are not."""
    for request, first, row, n in pieces:
        if not n:
            continue
        tokens = np.array(request.tokens[first + 1 : first + 1 + n], np.int32)
        rows = np.arange(row, row + n, dtype=np.int32)
        try:
            logprobs, ids, top = context.logprobs(rows, tokens, request.params.prompt_logprobs or 0)
        except Exception as error:
            fail([request], error)
            continue
        named = zip(tokens.tolist(), logprobs.tolist(), ids.tolist(), top.tolist(), strict=True)
        # to where they belong: another sample may have put them there before
        request.prompt_logprobs[first : first + n] = [
            TokenLogprob(token, logprob, _named(*best)) for token, logprob, *best in named
        ]


def _named(ids: list[int], logprobs: list[float]) -> tuple[tuple[int, float], ...]:
    """Without those that stand for nothing, as where the model gives few tokens a chance."""
    return tuple((token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if token >= 0)
