"""/v1/completions."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pyvelo.engine.input_processor import Prompt
from pyvelo.outputs import FinishReason, RequestOutput, StreamPiece, TokenLogprob
from pyvelo.server.errors import refused
from pyvelo.server.generation import Job, OpenAIForm, answer_job, ended
from pyvelo.server.http import encoded
from pyvelo.server.params import completion_params, request_timeout
from pyvelo.server.schemas import MAX_PROMPTS, CompletionRequest, convert

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["complete", "prompts_of"]


async def complete(
    serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]
) -> RequestStream:
    """Answer a completion."""
    request = convert(body, CompletionRequest)
    request.lora = request.lora or serving.check_model(request.model)
    timeout = request_timeout(request, exchange.header("request-timeout-ms"))
    params = completion_params(request, ticket.tenant, timeout)
    silent = request.max_tokens == 0
    form = CompletionForm(serving, exchange.id, request, silent)
    prompts: list[Any] = prompts_of(request.prompt, "prompt")
    n_samples = len(prompts) * (params.best_of or params.n)
    if n_samples > MAX_PROMPTS:
        raise refused("n", f"n: {n_samples} samples of all prompts: ask for up to {MAX_PROMPTS}")
    if not request.add_special_tokens:
        model = serving.engine.model
        plain = partial(model.tokenize, add_special=False)
        prompts = [partial(plain, each) if isinstance(each, str) else each for each in prompts]
    return await answer_job(serving, exchange, ticket, Job(prompts, params, form, request.stream, silent))


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


def _silent_reason(reason: FinishReason) -> FinishReason:
    """Return why a request of no tokens ended; it ends at its length, whatever its token was."""
    return "length" if reason == "stop" else reason


_utf8 = codecs.getincrementaldecoder("utf-8")


class _Place:
    """Place in a text that comes token by token, in whole characters: the parts of one share its place."""

    def __init__(self) -> None:
        self.n_characters = 0
        self._decoder = _utf8("replace")

    def pass_by(self, token: bytes) -> int:
        """Return the place of a token, and go on behind it."""
        before = self.n_characters
        self.n_characters += len(self._decoder.decode(token))
        return before


class CompletionForm(OpenAIForm):
    """Answers and events of completions."""

    def __init__(self, serving: Serving, request_id: str, request: CompletionRequest, silent: bool) -> None:
        super().__init__(serving, request, f"cmpl-{request_id}", "text_completion", "text_completion")
        self._silent = silent
        self._request = request
        self._places: defaultdict[int, _Place] = defaultdict(_Place)
        self._begun: set[int] = set()

    def head(self, index: int) -> bytes:
        """Return nothing: the first piece says all."""
        return b""

    def piece(self, index: int, piece: StreamPiece) -> bytes:
        """Return one event, unless the piece says nothing."""
        text, reason, logprob = piece.text, piece.finish_reason, piece.logprob
        if not text and reason is None and logprob is None and not self._ids:
            return b""
        if self._silent:
            text, piece = self._firsts[index // self._n].echo, self._silenced(piece)
        parts = [self._open, b"%d" % index, b',"text":', encoded(text)]
        parts += [b',"logprobs":', b"null" if logprob is None else encoded(self._logprobs_of(index, piece))]
        if self._ids:
            parts += [b',"token_ids":', encoded(piece.token_ids)]
            if index not in self._begun:
                self._begun.add(index)
                parts += [b',"prompt_token_ids":', encoded(self._firsts[index // self._n].prompt_ids)]
        parts.append(ended(piece.finish_reason, piece.stop_reason, self.usage_so_far(index, piece)))
        return b"".join(parts)

    def answer(self, outputs: Sequence[RequestOutput], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer."""
        choices: list[dict[str, Any]] = []
        for first, output in zip(self._firsts, outputs, strict=True):
            for sample in output.outputs:
                logprobs = None
                if sample.logprobs is not None:
                    new = () if self._silent else sample.logprobs
                    scored = self._scored(output.prompt_token_ids[0], output.prompt_logprobs)
                    logprobs = self._logprobs([*scored, *new], _Place())
                reason = sample.finish_reason
                choice: dict[str, Any] = {
                    "index": len(choices),
                    "text": first.echo if self._silent else sample.text,
                    "logprobs": logprobs,
                    "finish_reason": _silent_reason(reason) if self._silent else reason,
                    "stop_reason": None if self._silent else sample.stop_reason,
                    **self.prompt_logprobs(output),
                }
                if self._ids:
                    choice["token_ids"] = () if self._silent else sample.token_ids
                    choice["prompt_token_ids"] = output.prompt_token_ids
                choices.append(choice)
        return {**self._base, "choices": choices, "usage": usage}

    def _silenced(self, piece: StreamPiece) -> StreamPiece:
        """Return the piece of a request of no tokens, without the token that was generated."""
        reason = piece.finish_reason and _silent_reason(piece.finish_reason)
        return replace(piece, token_ids=(), finish_reason=reason, stop_reason=None)

    def _scored(self, first: int, logprobs: Sequence[TokenLogprob | None] | None) -> list[TokenLogprob | int]:
        """Return the logprobs of an echoed prompt; its first token alone has none."""
        if not self._request.echo or logprobs is None:
            return []
        return [first, *(each for each in logprobs if each is not None)]

    def _logprobs_of(self, index: int, piece: StreamPiece) -> dict[str, Any]:
        """Return the logprobs of a piece; its places go on where the last piece ended."""
        first = self._firsts[index // self._n]
        tokens = self._scored(first.tokens[0], piece.prompt_logprobs)
        if piece.logprob is not None and not self._silent:
            tokens.append(piece.logprob)
        return self._logprobs(tokens, self._places[index])

    def _name(self, token: int) -> str:
        """Return the text of a token, or its bytes if they are no text: else several had one name."""
        text = self._text_of(token)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._serving.token_bytes(token))

    def _logprobs(self, tokens: Sequence[TokenLogprob | int], place: _Place) -> dict[str, Any]:
        """Return OpenAI's lists of tokens, logprobs, most likely tokens and places in the text."""
        text_of, hides = self._text_of, self._request.skip_special_tokens is not False
        bytes_of = self._serving.text_bytes if hides else self._serving.token_bytes
        found: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token in tokens:
            if isinstance(token, TokenLogprob):
                token_id = token.token_id
                text, logprob = text_of(token_id), token.logprob
                # the token itself is among them, as OpenAI has it, and first, as vLLM has it
                best = {self._name(token_id): logprob}
                best |= {self._name(each): value for each, value in token.top}
            else:
                token_id, text, logprob, best = token, text_of(token), None, None
            found["tokens"].append(text)
            found["token_logprobs"].append(logprob)
            found["top_logprobs"].append(best)
            found["text_offset"].append(place.pass_by(bytes_of(token_id)))
        return found
