"""Answers and events of /completion, as llama-server's clients read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from pyvelo.outputs import FinishReason, RequestOutput, RequestTimes, StreamPiece, TokenLogprob, Usage
from pyvelo.sampling import SamplingParams
from pyvelo.server.chat import logprob_of
from pyvelo.server.errors import HttpError
from pyvelo.server.http import EVENTS, PING, encoded
from pyvelo.server.schemas import CompletionRequest

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.engine.request import Request
    from pyvelo.server.serving import Serving

__all__ = ["LlamaCompletion", "LlamaForm", "settings_of"]

_NO_SLOT = -1
_SHORT = {"stop": None, "grammar": "", "logit_bias": ()}


@dataclass(frozen=True)
class _End:
    """End of a sample."""

    reason: FinishReason
    stop_reason: int | str | None
    usage: Usage
    times: RequestTimes


Field = Annotated[str, Meta(max_length=256)]


class LlamaCompletion(CompletionRequest, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    return_tokens: bool = False
    response_fields: Annotated[list[Field], Meta(max_length=64)] | None = None


class LlamaForm:
    """Answers and events of completions.

    Args:
        silent: the token that is generated is not returned.
        several: the answer is a list, as the prompts were.
    """

    media_type = EVENTS
    ping = PING

    def __init__(
        self,
        serving: Serving,
        request: LlamaCompletion,
        params: SamplingParams,
        silent: bool,
        several: bool,
    ) -> None:
        self._serving, self._silent, self._several = serving, silent, several
        self._return_tokens, self._fields = request.return_tokens, request.response_fields
        self._model = request.lora or serving.model_name
        self._settings = settings_of(params, request.stream)
        if silent:
            self._settings |= {"n_predict": 0, "max_tokens": 0}
        self._firsts: list[Request] = []
        self._n_new: dict[int, int] = {}
        self._lines: set[int] = set()

    def begin(self, stream: RequestStream) -> None:
        """Take the requests."""
        self._firsts = stream.firsts

    def head(self, index: int) -> bytes:
        """Return nothing: the first piece says all."""
        return b""

    def piece(self, index: int, piece: StreamPiece) -> bytes:
        """Return the event of a token, and the last one of a sample."""
        found = b""
        if not self._silent and piece.token_ids:
            n_new = self._n_new[index] = self._n_new.get(index, 0) + 1
            if "\n" in piece.text:
                self._lines.add(index)
            event = {
                "index": index,
                "content": piece.text,
                "tokens": piece.token_ids,
                "stop": False,
                "id_slot": _NO_SLOT,
                "tokens_predicted": n_new,
                "tokens_evaluated": self._firsts[index].n_prompt,
                **self._probabilities([] if piece.logprob is None else [piece.logprob]),
            }
            found = b"data: " + encoded(event) + b"\n\n"
        if piece.finish_reason is None or piece.usage is None or piece.times is None:
            return found
        end = _End(piece.finish_reason, piece.stop_reason, piece.usage, piece.times)
        last = self._cut({"content": "", "tokens": (), **self._ended(index, end, index in self._lines)})
        return found + b"data: " + encoded(last) + b"\n\n"

    def end(self, usage: Mapping[str, Any]) -> bytes:
        """Return nothing: each sample has told its end."""
        return b""

    def failed(self, error: HttpError) -> bytes:
        """Return the error."""
        return b"data: " + encoded(error.body) + b"\n\n"

    def answer(self, outputs: Sequence[RequestOutput], usage: Mapping[str, Any]) -> Any:
        """Return the whole answer, or a list of them."""
        found = [self._whole(index, output) for index, output in enumerate(outputs)]
        return found if self._several else found[0]

    def _whole(self, index: int, output: RequestOutput) -> dict[str, Any]:
        sample = output.outputs[0]
        end = _End(sample.finish_reason, sample.stop_reason, output.usage, output.times)
        text = "" if self._silent else sample.text
        whole = {
            "content": text,
            "tokens": sample.token_ids if self._return_tokens and not self._silent else (),
            **self._ended(index, end, "\n" in text),
            **self._probabilities(() if self._silent else sample.logprobs or ()),
        }
        return self._cut(whole)

    def _cut(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of an answer that were asked for; all by default."""
        return _chosen(answer, self._fields) if self._fields else answer

    def _ended(self, index: int, end: _End, has_new_line: bool) -> dict[str, Any]:
        """Return the fields of the end of a sample."""
        first = self._firsts[index]
        model = self._serving.engine.model
        n_prompt, n_new = end.usage.prompt_tokens, 0 if self._silent else end.usage.completion_tokens
        kind, word = ("limit", "") if self._silent else _stop_of(end)
        return {
            "index": index,
            "id_slot": _NO_SLOT,
            "stop": True,
            "model": self._model,
            "tokens_predicted": n_new,
            "tokens_evaluated": n_prompt,
            "tokens_cached": n_prompt + n_new,
            # what may be long stands in the first answer alone
            "generation_settings": {**self._settings, **(_SHORT if index else {})},
            "prompt": model.detokenize(first.tokens[:n_prompt], special=True).decode("utf-8", "replace"),
            "has_new_line": has_new_line,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": word,
            "timings": _timings(end.usage, end.times, n_new),
        }

    def _probabilities(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the logprobs of tokens; nothing if they were not asked for."""
        if not logprobs:
            return {}
        found = []
        for each in logprobs:
            shown = logprob_of(self._serving, each)
            best = zip(each.top, shown["top_logprobs"], strict=True)
            shown["top_logprobs"] = [{"id": token, **value} for (token, _), value in best]
            found.append({"id": each.token_id, **shown})
        return {"completion_probabilities": found}


def settings_of(params: SamplingParams, streams: bool) -> dict[str, Any]:
    """Return the parameters of a request by llama-server's names; -1: no limit, or a random seed."""
    bias = [
        {"token": token, "bias": value if isfinite(value) else None}
        for token, value in (params.logit_bias or {}).items()
    ]
    most = -1 if params.max_tokens is None else params.max_tokens
    return {
        "n_predict": most,
        "max_tokens": most,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": params.stop,
        "ignore_eos": params.ignore_eos,
        "logit_bias": bias,
        "n_probs": params.logprobs or 0,
        "grammar": params.grammar or "",
        "stream": streams,
    }


def _stop_of(end: _End) -> tuple[str, str]:
    """Return why a sample ended, and the stop string."""
    if end.reason == "stop":
        return ("word", end.stop_reason) if isinstance(end.stop_reason, str) else ("eos", "")
    return ("limit" if end.reason == "length" else "none"), ""


def _timings(usage: Usage, times: RequestTimes, n_new: int) -> dict[str, float]:
    """Return times in milliseconds; the first token belongs to the prompt, and the queue, too."""
    n_prompt = usage.prompt_tokens - usage.cached_tokens
    first = times.end if times.first_token is None else times.first_token
    prompt_ms, new_ms = 1000 * (first - times.queued), 1000 * (times.end - first)
    n_steps = max(0, n_new - 1)
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": n_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(1, n_prompt),
        "prompt_per_second": 1000 * n_prompt / prompt_ms if prompt_ms else 0.0,
        "predicted_n": n_new,
        "predicted_ms": new_ms,
        "predicted_per_token_ms": new_ms / n_steps if n_steps else 0.0,
        "predicted_per_second": 1000 * n_steps / new_ms if n_steps and new_ms else 0.0,
    }


def _chosen(answer: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the fields at paths such as timings/prompt_n; unknown fields are left out."""
    found = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            found[path] = value
    return found
