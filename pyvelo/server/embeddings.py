"""/v1/embeddings."""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pyvelo.server.completions import prompts_of
from pyvelo.server.errors import refused
from pyvelo.server.schemas import EmbeddingRequest, convert
from pyvelo.threads import in_thread

if TYPE_CHECKING:
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["embed"]


async def embed(serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]) -> None:
    """Answer with the vectors of texts."""
    request = convert(body, EmbeddingRequest)
    serving.check_model(request.model)
    if request.encoding_format not in ("float", "base64"):
        raise refused(
            "encoding_format", f"encoding_format={request.encoding_format[:64]!r}: give float or base64"
        )
    width = serving.engine.model.info.n_embd_out
    if request.dimensions not in (None, width):
        raise refused("dimensions", f"dimensions={request.dimensions}: this model has {width}, and cuts none")
    texts = prompts_of(request.input, "input")
    stopped, model = threading.Event(), serving.engine.model

    def count() -> int:
        return sum(
            len(model.tokenize(text, add_special=True)) if isinstance(text, str) else len(text)
            for text in texts
        )

    try:
        n_tokens = await serving.loop.preparer.run(count)
        serving.admission.queue(ticket, n_tokens, ())
        vectors = await in_thread(
            partial(serving.engine.embeddings.embed, texts, request.pooling, True, stopped.is_set, None)
        )
    finally:
        stopped.set()
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
    await exchange.answer({"object": "list", "model": serving.model_name, "data": data, "usage": usage})
