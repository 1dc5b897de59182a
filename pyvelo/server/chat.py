"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pyvelo.chat.answer_format import AnswerReader
from pyvelo.chat.conversation import ChatOptions, ChatPrompt
from pyvelo.outputs import Delta, RequestOutput, StreamPiece, TokenLogprob
from pyvelo.sampling import SamplingParams
from pyvelo.server.generation import Job, OpenAIForm, answer_job, ended
from pyvelo.server.http import encoded
from pyvelo.server.params import chat_params, request_timeout
from pyvelo.server.schemas import ChatRequest, TokenizeRequest, convert

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["as_template_reads", "chat", "chat_prompt", "logprob_of", "params_of"]


async def chat(
    serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]
) -> RequestStream:
    """Answer a conversation."""
    request = convert(body, ChatRequest)
    request.lora = request.lora or serving.check_model(request.model)
    params = params_of(serving, exchange, ticket, request)
    form = ChatForm(serving, exchange.id, request)
    prompt = partial(chat_prompt, serving, request)
    job = Job([prompt], params, form, request.stream, reader=form.reader)
    return await answer_job(serving, exchange, ticket, job)


def params_of(serving: Serving, exchange: Exchange, ticket: Ticket, request: ChatRequest) -> SamplingParams:
    """Return the parameters of a chat; raise HttpError or RequestError if a value cannot be served."""
    timeout = request_timeout(request, exchange.header("request-timeout-ms"))
    return chat_params(request, serving.chats.params, ticket.tenant, timeout)


def chat_prompt(serving: Serving, request: ChatRequest | TokenizeRequest) -> ChatPrompt:
    """Return the tokens of a conversation; slow, as templates may be."""
    arguments = dict(request.chat_template_kwargs or {})
    if isinstance(request, ChatRequest) and request.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", request.reasoning_effort)
    options: ChatOptions = {
        "chat_template": request.chat_template,
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
        "template_arguments": arguments,
    }
    if isinstance(request, ChatRequest):
        options["tools"] = request.tools
        # named even if it is the default, so that a template without a format of calls is refused
        options["tool_choice"] = request.tool_choice or ("auto" if request.tools else None)
        options["parallel_tool_calls"] = request.parallel_tool_calls
    return serving.chats.one(as_template_reads(request.messages or ()), **options)


def as_template_reads(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without fields that are null; templates know the developer as system."""
    return [_as_template_reads(message) for message in messages]


def _as_template_reads(message: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if value is not None or name == "content"}
    return {**kept, "role": "system"} if kept.get("role") == "developer" else kept


class ChatForm(OpenAIForm):
    """Answers and events of chats, with reasoning and tool calls if the template's format has them."""

    def __init__(self, serving: Serving, request_id: str, request: ChatRequest) -> None:
        super().__init__(
            serving, request, f"chatcmpl-{request_id}", "chat.completion", "chat.completion.chunk"
        )
        self.reader = AnswerReader()

    def head(self, index: int) -> bytes:
        """Return the event with the role."""
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        ids = b',"prompt_token_ids":' + encoded(self._firsts[0].prompt_ids) if self._ids else b""
        return b"%s%d%s%s%s}\n\n" % (self._open, index, delta, ids, self.usage_so_far(index))

    def piece(self, index: int, piece: StreamPiece) -> bytes:
        """Return the events of a piece; none if it says nothing."""
        deltas = [_delta(each) for each in self.reader.push(index, piece)]
        reason = _reason(piece.finish_reason, index in self.reader.called)
        if not deltas:
            if reason is None and piece.logprob is None and not self._ids:
                return b""
            deltas = [{"content": ""}] if reason is None else [{}]
        first = [self._event(index, delta) for delta in deltas[:-1]]
        return b"".join([*first, self._event(index, deltas[-1], piece, reason)])

    def _event(
        self, index: int, delta: dict[str, Any], piece: StreamPiece | None = None, reason: str | None = None
    ) -> bytes:
        """Return an event; the last of a piece has its logprobs, its token and the reason of the end."""
        parts = [self._open, b"%d" % index, b',"delta":', encoded(delta), b',"logprobs":']
        logprob = None if piece is None else piece.logprob
        parts.append(encoded(None if logprob is None else {"content": [self._logprob(logprob)]}))
        if piece is not None and self._ids:
            parts += [b',"token_ids":', encoded(piece.token_ids)]
        usage = self.usage_so_far(index, piece)
        parts.append(ended(reason, None if piece is None else piece.stop_reason, usage))
        return b"".join(parts)

    def answer(self, outputs: Sequence[RequestOutput], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer."""
        choices: list[dict[str, Any]] = []
        for output in outputs:
            for sample in output.outputs:
                logprobs = sample.logprobs and {"content": list(map(self._logprob, sample.logprobs))}
                message = self._message(sample.text)
                choice: dict[str, Any] = {
                    "index": len(choices),
                    "message": message,
                    "logprobs": logprobs or None,
                    "finish_reason": _reason(sample.finish_reason, "tool_calls" in message),
                    "stop_reason": sample.stop_reason,
                }
                if self._ids:
                    choice["token_ids"] = sample.token_ids
                choices.append(choice)
        scored = self.prompt_logprobs(outputs[0])
        if self._ids:
            scored["prompt_token_ids"] = outputs[0].prompt_token_ids
        return {**self._base, "choices": choices, "usage": usage, **scored}

    def _logprob(self, token: TokenLogprob) -> dict[str, Any]:
        return logprob_of(self._serving, token, self._text_of)

    def _message(self, text: str) -> dict[str, Any]:
        found = self.reader.parse(text)
        content = found.content if found.content or not found.tool_calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if found.reasoning is not None:
            message["reasoning_content"] = found.reasoning
        if found.tool_calls:
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in found.tool_calls]
        return message


def _reason(reason: str | None, calls: bool) -> str | None:
    return "tool_calls" if calls and reason == "stop" else reason


def _call(call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _delta(delta: Delta) -> dict[str, Any]:
    """Return a delta as OpenAI's clients read it."""
    if delta.index is not None:
        named = delta.id is not None
        part = (
            _call(delta.id, delta.name, delta.arguments)
            if named
            else {"function": {"arguments": delta.arguments}}
        )
        return {"tool_calls": [{"index": delta.index, **part}]}
    return {"reasoning_content": delta.reasoning} if delta.reasoning else {"content": delta.content}


def logprob_of(
    serving: Serving, token: TokenLogprob, text_of: Callable[[int], str] | None = None
) -> dict[str, Any]:
    """Return the logprobs of a token of an answer and of the most likely ones, by their texts."""
    name_of = text_of or serving.token_text

    def named(token: int, logprob: float) -> dict[str, Any]:
        return {"token": name_of(token), "logprob": logprob, "bytes": list(serving.token_bytes(token))}

    best = [named(each, value) for each, value in token.top]
    return {**named(token.token_id, token.logprob), "top_logprobs": best}
