"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from pyvelo.server.chat import chat_prompt
from pyvelo.server.errors import refused
from pyvelo.server.http import encoded, encoded_list
from pyvelo.server.schemas import DetokenizeRequest, TokenizeRequest, convert

if TYPE_CHECKING:
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["detokenize", "tokenize", "tokenizer_info"]


async def tokenize(serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]) -> None:
    """Answer with the tokens of a text or of a conversation; as llama-server if the text is in `content`."""
    as_llama = "content" in body
    if as_llama:
        body = {"add_special": False, **{name: value for name, value in body.items() if value is not None}}
    request = convert(body, TokenizeRequest)
    serving.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise refused("prompt", "give either prompt or messages")
    model, prompt = serving.engine.model, request.prompt

    def make() -> bytes:
        if prompt is None:
            found = list(chat_prompt(serving, request))
        else:
            found = model.tokenize(prompt, add_special=request.add_special_tokens, parse_special=True)
        ids: Iterable[Any] = found
        texts = None
        if as_llama and request.return_token_strs:
            ids = map(cache(lambda token: {"id": token, "piece": _piece(serving.token_bytes(token))}), found)
        elif request.return_token_strs:
            texts = encoded_list(map(serving.token_text, found))
        fields = {"count": len(found), "max_model_len": serving.engine.n_ctx, "token_strs": texts}
        return encoded({**fields, "tokens": encoded_list(ids)})

    await exchange.answer(await serving.loop.preparer.run(make))


async def detokenize(serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]) -> None:
    """Answer with the text of tokens."""
    request = convert(body, DetokenizeRequest)
    serving.check_model(request.model)
    n_vocab = serving.engine.model.vocab.n_tokens
    wrong = next((token for token in request.tokens if not 0 <= token < n_vocab), None)
    if wrong is not None:
        raise refused("tokens", f"token {wrong} does not exist: ids go from 0 to {n_vocab - 1}")
    model = serving.engine.model
    text = await serving.loop.preparer.run(lambda: model.detokenize(request.tokens, special=True))
    shown = text.decode("utf-8", "replace")
    await exchange.answer({"prompt": shown, "content": shown})


def _piece(raw: bytes) -> str | list[int]:
    """Return the text of a token, or its bytes if they are no whole characters."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)


def tokenizer_info(serving: Serving) -> dict[str, Any]:
    """Return what a client needs to write prompts of its own."""
    model = serving.engine.model
    vocab = model.vocab

    def named(token: int | None) -> str | None:
        return None if token is None else serving.token_text(token)

    return {
        "tokenizer_class": "PyVelo",
        "model_max_length": serving.engine.n_ctx,
        "vocab_size": vocab.n_tokens,
        "bos_token": named(vocab.bos),
        "eos_token": named(vocab.eos),
        "add_bos_token": vocab.add_bos,
        "chat_template": serving.chats.template.source,
    }
