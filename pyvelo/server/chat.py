"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from pyvelo.outputs import RequestOutput, StreamPiece, TokenLogprob
from pyvelo.server.generation import Job, answer_job
from pyvelo.server.params import chat_params, request_timeout
from pyvelo.server.schemas import ChatRequest, TokenizeRequest, convert

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["chat", "chat_prompt"]

_encode = msgspec.json.Encoder().encode


async def chat(
    serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]
) -> RequestStream:
    """Answer a conversation."""
    request = convert(body, ChatRequest)
    serving.check_model(request.model)
    timeout = request_timeout(request, exchange.header("request-timeout-ms"))
    params = chat_params(request, serving.chats.params, ticket.tenant, timeout)
    form = ChatForm(serving, exchange.id, request)
    prompt = partial(chat_prompt, serving, request)
    return await answer_job(serving, exchange, ticket, Job(request, [prompt], params, form))


def chat_prompt(serving: Serving, request: ChatRequest | TokenizeRequest) -> Sequence[int]:
    """Return the tokens of a conversation; slow, as templates may be."""
    arguments = dict(request.chat_template_kwargs or {})
    if isinstance(request, ChatRequest) and request.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", request.reasoning_effort)
    return serving.chats.one(
        [_as_template_reads(message) for message in request.messages or ()],
        chat_template=request.chat_template,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        template_arguments=arguments,
    )


def _as_template_reads(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without fields that are null; templates know the developer as system."""
    kept = {name: value for name, value in message.items() if value is not None or name == "content"}
    return {**kept, "role": "system"} if kept.get("role") == "developer" else kept


class ChatForm:
    """Answers and events of chats."""

    def __init__(self, serving: Serving, request_id: str, request: ChatRequest) -> None:
        self._serving = serving
        self._ids = bool(request.return_token_ids)
        self._base = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": serving.model_name,
            "system_fingerprint": serving.fingerprint,
        }
        self._chunk = {**self._base, "object": "chat.completion.chunk"}
        self._open = b"data: " + _encode(self._chunk)[:-1] + b',"choices":[{"index":'

    def head(self, index: int) -> bytes:
        """Return the event with the role."""
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        return b"%s%d%s" % (self._open, index, delta)

    def piece(self, index: int, piece: StreamPiece) -> bytes:
        """Return one event, unless the piece says nothing."""
        text, reason, logprob = piece.text, piece.finish_reason, piece.logprob
        if not text and reason is None and logprob is None:
            return b""
        parts = [self._open, b"%d" % index, b',"delta":{']
        if text or reason is None:
            parts += [b'"content":', _encode(text)]
        parts.append(b'},"logprobs":')
        parts.append(b"null" if logprob is None else _encode({"content": [self._logprob(logprob)]}))
        if self._ids:
            parts += [b',"token_ids":', _encode(piece.token_ids)]
        parts += [b',"finish_reason":', b"null" if reason is None else _encode(reason), b"}]}\n\n"]
        return b"".join(parts)

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """Return the event with the usage and without choices."""
        return b"data: " + _encode({**self._chunk, "choices": [], "usage": usage}) + b"\n\n"

    def answer(self, outputs: Sequence[RequestOutput], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer."""
        choices: list[dict[str, Any]] = []
        for output in outputs:
            for sample in output.outputs:
                logprobs = sample.logprobs and {"content": [self._logprob(each) for each in sample.logprobs]}
                choice: dict[str, Any] = {
                    "index": len(choices),
                    "message": {"role": "assistant", "content": sample.text, "refusal": None},
                    "logprobs": logprobs or None,
                    "finish_reason": sample.finish_reason,
                    "stop_reason": sample.stop_reason,
                }
                if self._ids:
                    choice |= {"token_ids": sample.token_ids, "prompt_token_ids": output.prompt_token_ids}
                choices.append(choice)
        return {**self._base, "choices": choices, "usage": usage}

    def _logprob(self, token: TokenLogprob) -> dict[str, Any]:
        best = [self._named(number, value) for number, value in token.top]
        return {**self._named(token.token_id, token.logprob), "top_logprobs": best}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._serving.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}
