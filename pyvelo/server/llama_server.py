"""/completion, /apply-template, /props and token counts, as llama-server's clients call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from pyvelo._version import __version__
from pyvelo.engine.input_processor import Prompt
from pyvelo.sampling import SamplingParams
from pyvelo.server.chat import chat_prompt
from pyvelo.server.errors import refused
from pyvelo.server.generation import Job, answer_job
from pyvelo.server.llama_server_form import LlamaCompletion, LlamaForm, settings_of
from pyvelo.server.params import completion_params, request_timeout
from pyvelo.server.schemas import MAX_PROMPTS, ChatRequest, convert

if TYPE_CHECKING:
    from pyvelo.chat.conversation import ChatPrompt
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.native import Model
    from pyvelo.server.admission import Ticket
    from pyvelo.server.http import Exchange
    from pyvelo.server.serving import Serving

__all__ = ["LlamaCompletion", "apply_template", "complete", "count_tokens", "props"]

DEFAULT = SamplingParams(max_tokens=None, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
"""Parameters of a request that gives none, as in llama-server."""

OTHER_NAMES = {"n_predict": "max_tokens", "n_probs": "logprobs"}

IGNORED = frozenset(
    {
        *("slot_id", "n_cache_reuse", "n_keep", "n_discard", "min_keep", "backend_sampling", "verbose"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("xtc_threshold", "dynatemp_exponent", "mirostat_tau", "mirostat_eta", "repeat_last_n"),
    }
)
"""Further fields that change no answer here: of slots, and of samplers that are off."""

OFF = {
    **{"dry_multiplier": 0, "xtc_probability": 0, "dynatemp_range": 0, "mirostat": 0, "typical_p": 1},
    **{"top_n_sigma": -1, "n_indent": 0, "t_max_predict_ms": -1, "post_sampling_probs": False},
}
"""Fields of what does not exist here, and the values that switch it off; so do null and 0."""


MAX_BIAS_CHARACTERS = 4096
"""Characters of all texts with a bias, which are tokenized in the event loop."""
_BIASES = 'logit_bias: give [[TOKEN or "text", NUMBER or false], ...]'


async def complete(
    serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]
) -> RequestStream:
    """Answer one prompt or several."""
    prompts, several = _prompts(serving.engine.model, body.get("prompt"))
    request = convert({**_fields(body), "prompt": ""}, LlamaCompletion)
    _check(request)
    request.lora = request.lora or serving.check_model(request.model)
    request.logit_bias = _bias(serving.engine.model, body.get("logit_bias"))
    timeout = request_timeout(request, exchange.header("request-timeout-ms"))
    params = completion_params(request, ticket.tenant, timeout, DEFAULT)
    silent = request.max_tokens == 0
    form = LlamaForm(serving, request, params, silent, several)
    return await answer_job(serving, exchange, ticket, Job(prompts, params, form, request.stream, silent))


async def apply_template(
    serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]
) -> None:
    """Answer with the prompt of a conversation as text for /completion, which adds the BOS token."""
    prompt = await _conversation(serving, body)
    vocab = serving.engine.model.vocab
    begins = serving.token_text(vocab.bos) if vocab.add_bos and vocab.bos is not None else ""
    await exchange.answer({"prompt": prompt.text.removeprefix(begins)})


async def count_tokens(serving: Serving, exchange: Exchange, ticket: Ticket, body: Mapping[str, Any]) -> None:
    """Answer with the number of tokens of a conversation."""
    await exchange.answer({"input_tokens": len(await _conversation(serving, body))})


async def _conversation(serving: Serving, body: Mapping[str, Any]) -> ChatPrompt:
    """Return the prompt of a conversation."""
    request = convert(body, ChatRequest)
    serving.check_model(request.model)
    return await serving.loop.preparer.run(partial(chat_prompt, serving, request))


async def props(serving: Serving, exchange: Exchange) -> None:
    """Answer with the properties of the model and the parameters of a request that gives none."""
    model, n_ctx = serving.engine.model, serving.engine.n_ctx
    vocab, info = model.vocab, model.info

    def named(token: int | None) -> str:
        return "" if token is None else serving.token_text(token)

    await exchange.answer(
        {
            "default_generation_settings": {"n_ctx": n_ctx, "params": settings_of(DEFAULT, streams=False)},
            "total_slots": serving.engine.limits.max_seqs if serving.generates else 1,
            "model_alias": serving.model_name,
            "model_path": serving.model_file,
            "modalities": {"vision": False, "audio": False},
            "chat_template": serving.chats.template.source,
            "bos_token": named(vocab.bos),
            "eos_token": named(vocab.eos),
            "n_params": info.n_params,
            "build_info": f"pyvelo {__version__}",
        }
    )


def _prompts(model: Model, given: Any) -> tuple[list[Prompt | Callable[[], Prompt]], bool]:
    """Return the prompts of a field, and whether it is a list of them.

    A prompt is a text, token ids, texts between token ids, or an object of a text.

    Raises: HttpError if it is none of them.
    """
    if not isinstance(given, list) or not given or any(_is_id(item) for item in given):
        return [_prompt(model, given, "prompt")], False
    if len(given) > MAX_PROMPTS:
        raise refused("prompt", f"prompt has {len(given)} items: give up to {MAX_PROMPTS}")
    return [_prompt(model, item, f"prompt[{number}]") for number, item in enumerate(given)], True


def _prompt(model: Model, given: Any, where: str) -> Prompt | Callable[[], Prompt]:
    if isinstance(given, dict):
        if given.get("multimodal_data"):
            raise refused("prompt", f"{where}.multimodal_data is not supported: prompts are text")
        given = given.get("prompt_string")
    if isinstance(given, str):
        return partial(_join, model, [given])
    if isinstance(given, list) and given and all(_is_id(item) or isinstance(item, str) for item in given):
        return partial(_join, model, given) if any(isinstance(item, str) for item in given) else given
    raise refused("prompt", f"{where}: give a text, token ids, or both in a list")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _join(model: Model, parts: Sequence[int | str]) -> list[int]:
    """Return the tokens of a prompt of texts, which may name special tokens, and token ids."""
    found: list[int] = []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            found.append(part)
        else:
            found += model.tokenize(part, add_special=number == 0, parse_special=True)
    return found


def _fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body by OpenAI's names.

    Raises: HttpError at one that would change the answer and does not exist here.
    """
    found = {}
    for name, value in body.items():
        if name in OFF:
            if value not in (None, 0, OFF[name]):
                raise refused(name, f"{name} is not supported: leave it out")
        elif name not in IGNORED and name not in ("prompt", "logit_bias"):
            found[OTHER_NAMES.get(name, name)] = value
    for name in ("max_tokens", "seed", "temperature"):  # -1 is none, or greedy
        if isinstance(found.get(name), (int, float)) and found[name] < 0:
            found[name] = 0 if name == "temperature" else None
    for name in ("logprobs", "grammar", "lora", "json_schema"):
        if not found.get(name):
            found.pop(name, None)
    if isinstance(found.get("stop"), list):
        found["stop"] = [text for text in found["stop"] if text != ""]
    return found


def _check(request: LlamaCompletion) -> None:
    """Raise HttpError at what `CompletionRequest` has and the answers have no place for."""
    if (request.n or 1) > 1 or (request.best_of or 1) > 1:
        raise refused("n", "n: an answer has one sample: repeat the prompt in a list, or ask /v1/completions")
    if request.prompt_logprobs is not None or request.echo:
        raise refused("prompt_logprobs", "prompt_logprobs, echo: ask /v1/completions")


def _bias(model: Model, given: Any) -> dict[str, float] | None:
    """Return the bias by token id, of pairs or of a dictionary; a text stands for each of its tokens.

    Raises: HttpError if it is neither.
    """
    if not given:
        return None
    by_id = isinstance(given, dict)
    pairs = list(given.items()) if by_id else given
    found: dict[str, float] = {}
    n_characters = 0
    for pair in pairs if isinstance(pairs, list) else [None]:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise refused("logit_bias", _BIASES)
        token, bias = pair
        if not (_is_id(token) or isinstance(token, str)) or not (bias is False or _is_bias(bias)):
            raise refused("logit_bias", _BIASES)
        tokens = [token]
        if isinstance(token, str) and not (by_id and token.isascii() and token.isdigit()):
            n_characters += len(token)
            if n_characters > MAX_BIAS_CHARACTERS:
                raise refused(
                    "logit_bias", f"logit_bias: its texts have {MAX_BIAS_CHARACTERS} characters at most"
                )
            tokens = model.tokenize(token, add_special=False)
        found |= {str(each): -inf if bias is False else float(bias) for each in tokens}
    return found


def _is_bias(value: Any) -> bool:
    """Return whether a value is a number that a float can be."""
    return isinstance(value, float) or (_is_id(value) and abs(value) <= 1e6)
