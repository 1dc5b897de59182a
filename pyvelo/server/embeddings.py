"""/v1/embeddings."""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pyvelo.engine.embedding import NO_POOLING
from pyvelo.native import POOLINGS
from pyvelo.server.completions import prompts_of
from pyvelo.server.errors import refused
from pyvelo.server.schemas import EmbeddingRequest, convert
from pyvelo.threads import in_thread

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pyvelo.engine.input_processor import Prompt
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["embed", "vectors_of"]


async def embed(serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]) -> None:
    """Answer with the vectors of texts."""
    request = convert(body, EmbeddingRequest)
    adapter = serving.check_model(request.model)
    if request.encoding_format not in ("float", "base64"):
        raise refused(
            "encoding_format", f"encoding_format={request.encoding_format[:64]!r}: give float or base64"
        )
    texts = prompts_of(request.input, "input")
    vectors, n_tokens = await vectors_of(serving, ticket, texts, adapter, request.dimensions, request.pooling)
    as_text = request.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": number,
            "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
            if as_text
            else vector.tolist(),
        }
        for number, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    name = adapter or serving.model_name
    await exchange.answer({"object": "list", "model": name, "data": data, "usage": usage})


async def vectors_of(
    serving: Serving,
    ticket: Ticket,
    texts: Sequence[Prompt],
    adapter: str | None,
    dimensions: int | None = None,
    pooling: str | None = None,
) -> tuple[NDArray[np.float32], int]:
    """Return a vector for each text, and the number of their tokens.

    Raises: HttpError, VeloError if they cannot be embedded so.
    """
    width = serving.engine.model.info.n_embd_out
    if dimensions not in (None, width):
        raise refused("dimensions", f"dimensions={dimensions}: this model has {width}, and cuts none")
    stopped, model = threading.Event(), serving.engine.model
    if pooling is None and model.info.pooling == NO_POOLING:
        names = ", ".join(POOLINGS)
        raise refused("pooling", f"pooling is missing, and this model names none: give one of {names}")

    def count() -> int:
        return sum(
            len(model.tokenize(text, add_special=True)) if isinstance(text, str) else len(text)
            for text in texts
        )

    try:
        n_tokens = await serving.loop.preparer.run(count)
        serving.admission.queue(ticket, n_tokens, ())
        embed = partial(serving.engine.embeddings.embed, lora=adapter)
        vectors = await in_thread(partial(embed, texts, pooling, True, stopped.is_set))
    finally:
        stopped.set()
    return vectors, n_tokens
