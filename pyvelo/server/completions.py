"""/v1/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from pyvelo.engine.input_processor import Prompt
from pyvelo.outputs import RequestOutput, StreamPiece, TokenLogprob
from pyvelo.server.errors import refused
from pyvelo.server.generation import Job, answer_job
from pyvelo.server.params import completion_params, request_timeout
from pyvelo.server.schemas import MAX_PROMPTS, CompletionRequest, convert

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["complete", "prompts_of"]

_encode = msgspec.json.Encoder().encode


async def complete(
    serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]
) -> RequestStream:
    """Answer a completion."""
    request = convert(body, CompletionRequest)
    serving.check_model(request.model)
    timeout = request_timeout(request, exchange.header("request-timeout-ms"))
    params = completion_params(request, ticket.tenant, timeout)
    silent = request.max_tokens == 0
    form = CompletionForm(serving, exchange.id, request, silent)
    prompts: list[Any] = prompts_of(request.prompt, "prompt")
    if not request.add_special_tokens:
        model = serving.engine.model
        plain = partial(model.tokenize, add_special=False)
        prompts = [partial(plain, each) if isinstance(each, str) else each for each in prompts]
    return await answer_job(serving, exchange, ticket, Job(request, prompts, params, form, silent))


def prompts_of(given: str | list[Any], name: str) -> list[Prompt]:
    """Return the prompts of a field: a text, token ids, or a list of either.

    Raises: HttpError if texts, ids and lists of ids are mixed, or if there are too many.
    """
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [list(given)]
    if len(kinds) > 1:
        raise refused(name, f"{name}: give texts alone, or token ids alone")
    if len(given) > MAX_PROMPTS:
        raise refused(name, f"{name} has {len(given)} items: give up to {MAX_PROMPTS}")
    return list(given)


class CompletionForm:
    """Answers and events of completions."""

    def __init__(self, serving: Serving, request_id: str, request: CompletionRequest, silent: bool) -> None:
        self._serving = serving
        self._silent = silent
        self._request = request
        self._base = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": serving.model_name,
            "system_fingerprint": serving.fingerprint,
        }
        self._open = b"data: " + _encode(self._base)[:-1] + b',"choices":[{"index":'
        self._ids = bool(request.return_token_ids)
        self._offsets: dict[int, int] = {}

    def head(self, index: int) -> bytes:
        """Return nothing: the first piece says all."""
        return b""

    def piece(self, index: int, piece: StreamPiece) -> bytes:
        """Return one event, unless the piece says nothing."""
        text, reason, logprob = piece.text, piece.finish_reason, piece.logprob
        if not text and reason is None and logprob is None:
            return b""
        parts = [self._open, b"%d" % index, b',"text":', _encode(self._kept(text))]
        if logprob is None and not self._ids:
            parts.append(b',"logprobs":null')
        else:
            parts += [b',"logprobs":', _encode(self._piece_logprobs(index, piece))]
        if self._ids:
            parts += [b',"token_ids":', _encode(piece.token_ids)]
        parts += [b',"finish_reason":', b"null" if reason is None else _encode(reason), b"}]}\n\n"]
        return b"".join(parts)

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """Return the event with the usage and without choices."""
        return b"data: " + _encode({**self._base, "choices": [], "usage": usage}) + b"\n\n"

    def answer(self, outputs: Sequence[RequestOutput], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer."""
        choices: list[dict[str, Any]] = []
        for output in outputs:
            for sample in output.outputs:
                logprobs = None
                if sample.logprobs is not None:
                    new = [] if self._silent else list(sample.logprobs)
                    logprobs = self._logprobs([*self._prompt_logprobs(output), *new], 0)
                choice: dict[str, Any] = {
                    "index": len(choices),
                    "text": self._kept(sample.text, output.prompt),
                    "logprobs": logprobs,
                    "finish_reason": "length" if self._silent else sample.finish_reason,
                    "stop_reason": sample.stop_reason,
                }
                if self._ids:
                    choice["token_ids"] = () if self._silent else sample.token_ids
                    choice["prompt_token_ids"] = output.prompt_token_ids
                choices.append(choice)
        return {**self._base, "choices": choices, "usage": usage}

    def _kept(self, text: str, prompt: str | None = None) -> str:
        """Return the text of an answer, without what was generated for a request of no tokens."""
        if not self._silent:
            return text
        return (prompt or "") if self._request.echo else ""

    def _prompt_logprobs(self, output: RequestOutput) -> list[TokenLogprob | int]:
        """Return the logprobs of an echoed prompt; its first token alone has none."""
        if not self._request.echo or output.prompt_logprobs is None:
            return []
        return [output.prompt_token_ids[0], *(each for each in output.prompt_logprobs if each is not None)]

    def _piece_logprobs(self, index: int, piece: StreamPiece) -> dict[str, Any] | None:
        if piece.logprob is None:
            return None
        start = self._offsets.get(index, 0)
        self._offsets[index] = start + len(piece.text)
        return self._logprobs([piece.logprob], start)

    def _logprobs(self, tokens: Sequence[TokenLogprob | int], offset: int) -> dict[str, Any]:
        """Return OpenAI's lists of tokens, logprobs, most likely tokens and places in the text."""
        text_of = self._serving.token_text
        found: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token in tokens:
            known = isinstance(token, TokenLogprob)
            text = text_of(token.token_id if isinstance(token, TokenLogprob) else token)
            found["tokens"].append(text)
            found["token_logprobs"].append(token.logprob if isinstance(token, TokenLogprob) else None)
            best = (
                {text_of(each): value for each, value in token.top} if isinstance(token, TokenLogprob) else {}
            )
            found["top_logprobs"].append(best if known else None)
            found["text_offset"].append(offset)
            offset += len(text)
        return found
