"""LLM, the blocking interface: text generation with a GGUF model over a paged KV cache."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, overload

from pyvelo.beam_search import search
from pyvelo.chat.conversation import ChatOptions, Chats, is_one, parsed, with_formats
from pyvelo.chat.messages import Message
from pyvelo.chat.template import ChatTemplate
from pyvelo.config import EngineConfig, GpuLayers, KVTypes, LoraGiven, Precision, lora_setting
from pyvelo.engine.engine import open_engine
from pyvelo.engine.input_processor import Asked, AskedOfAll, Prompt, for_each, listed
from pyvelo.engine.loop import Read, Stream, run_all, run_steps
from pyvelo.engine.output import outputs_of
from pyvelo.engine.stats import EngineStats
from pyvelo.engine_view import EngineView
from pyvelo.keywords import checked, either
from pyvelo.kv_events import KVEvents
from pyvelo.kv_store import KVStore
from pyvelo.outputs import LoraInfo, Pooling, RequestOutput, StreamPiece
from pyvelo.sampling import BeamSearchParams, SamplingParams
from pyvelo.session import Session
from pyvelo.store.saved import delete_session, load_sequence, purge
from pyvelo.trace.recorder import recording

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

__all__ = ["LLM"]


class LLM(EngineView):
    """A GGUF model and its KV cache. Thread-safe: the requests of all threads share every step.

    A model that only embeds (such as BERT) has no cache: `embed` works, and other calls raise
    UnsupportedError.

    model: path of the GGUF file, or of its first part; or a name on the hub, such as "org/repo:Q4_K_M" (see
        pyvelo.models.hub.locate), which needs the extra `hub`.
    kv_type: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl, or a pair of them for K and V.
    block_size: tokens in a block: 32, 64, 128 or 256; increased if a GPU needs larger blocks.
    kv_cache_bytes: memory for the cache. None: room for four sequences of n_ctx (or 8192) tokens and at least
        8192 tokens; at most 2 GiB unless one sequence of n_ctx (or 4096) tokens needs more.
    memory_utilization: largest share of the free memory for weights and cache, without kv_cache_bytes.
    n_ctx: longest sequence in tokens, prompt and answer; None: the length that the model was trained on, if
        the cache holds it.
    max_num_seqs: sequences that run at once; at most max_batch_tokens, and with recurrent layers at most 256
        and as many as have their states in 1 GiB. The others wait.
    max_batch_tokens: tokens of one step; longer prompts run in chunks.
    n_threads: threads that compute. None: one for each performance core that the process may run on, but no
        more than its CPU quota (`pyvelo info` shows both).
    n_gpu_layers: layers on GPUs, the last ones first, including the output; -1: all; "auto": as many as fit
        beside the cache, and 0 without a GPU.
    prefix_cache: share blocks of equal prefixes, also with sequences that ended. With recurrent layers, a
        prefix is shared up to a place where a snapshot of their states was taken.
    swap_bytes: host memory for the blocks of preempted sequences. Sequences that do not fit, or are quicker
        to compute, are computed again. The rest of it has blocks of `kv_store`.
    kv_store: folder, valkey://HOST:PORT or `KVStore` for blocks that outlive the process; extra `store`.
    kv_events: address such as tcp://127.0.0.1:5557, or `KVEvents`, for routers; extra `events`.
    deterministic: the same tokens whether a request runs alone or beside others.
    attention_precision: "exact" rounds attention no more than llama.cpp does; "fast": bfloat16 for many rows.
    seed: for requests without a seed.
    progress: called during the load with the loaded share, 0..1. If weights are packed for this processor,
        the first step packs them and calls it again, in the thread that computes. Its exception ends both.
    lora: LoRA adapters (GGUF): a dictionary from names to paths, or to pairs of path and scale. A single path
        or pair is the default of all requests, under the name of the file without its suffix.
    max_model_len, max_num_batched_tokens: vLLM's names of n_ctx and max_batch_tokens.

    Raises:
        ModelError, UnsupportedError: the file cannot be used. ConfigError, OutOfMemory: the settings cannot.
    """

    _instead = "threads may share it; another process opens its own"

    @checked(params=SamplingParams)
    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        kv_type: KVTypes = "f16",
        block_size: int = 32,
        kv_cache_bytes: int | None = None,
        memory_utilization: float = 0.9,
        n_ctx: int | None = None,
        max_num_seqs: int = 256,
        max_batch_tokens: int = 512,
        n_threads: int | None = None,
        n_gpu_layers: GpuLayers = "auto",
        prefix_cache: bool = True,
        swap_bytes: int = 0,
        kv_store: str | os.PathLike[str] | KVStore | None = None,
        kv_events: str | KVEvents | None = None,
        deterministic: bool = False,
        attention_precision: Precision = "exact",
        seed: int | None = None,
        progress: Callable[[float], object] | None = None,
        lora: LoraGiven | Mapping[str, LoraGiven] | None = None,
        max_model_len: int | None = None,
        max_num_batched_tokens: int | None = None,
    ) -> None:
        settings = {name: value for name, value in locals().items() if name != "self"}
        self._engine = open_engine(EngineConfig(**settings))
        self._chats = Chats(self._engine.model)

    # ---- generation ----

    @checked(params=SamplingParams)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_id: str | None = None,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """Generate from one prompt or from a list of them; always return a list, in the order of the prompts.

        Args:
            prompts: text or token ids, one or a list.
            params: for all prompts, or one for each; vLLM's name is sampling_params.
            request_id: name in the output (None: a unique one); of several prompts, i gets "request_id-i".
            return_errors: put the error of a request that fails into its output. Else it is raised when the
                other requests have finished.

        Raises:
            RequestError, OutOfBlocks: a prompt can never be served; then none of them starts.
        """
        self._engine.loop.check_open()
        given = listed(prompts)
        asked = self._engine.processor.ask_all(len(given), either(params, sampling_params), request_id)
        return self._answer(given, asked, return_errors)

    @checked(params=SamplingParams)
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> Generator[StreamPiece, None, None]:
        """Generate from one prompt; yield a piece for every token as it comes.

        The prompt is checked at once. It is submitted, and its `timeout` begins, with the first `next`.
        Closing or dropping the generator cancels the request. `request_id` is as in `generate`.
        """
        self._engine.loop.check_open()
        param = for_each(either(params, sampling_params), 1)[0]
        return self._stream(prompt, param, self._engine.processor.ask(param, request_id, timed=False))

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput: ...

    @checked(ChatOptions, params=SamplingParams)
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one conversation with an output, or a list of conversations with a list of outputs.

        Only the template writes control tokens; their names in a content are text. The `prompt` of an
        output is the conversation as the template wrote it.

        Args:
            messages: dictionaries with role and content, or a list of such lists; [] has no conversations.
            params: one, or one for each; None: `get_default_sampling_params`. request_id: as in `generate`.
            tools: JSON schemas of functions. Outputs have `tool_calls` and `reasoning` beside the raw `text`.
            tool_choice, parallel_tool_calls: as OpenAI's; a required call needs the extra `grammar`.
            chat_template: Jinja source, or the name of a template: "chatml", or another one of the model.
            add_generation_prompt: write the beginning of the answer; default True.
            continue_final_message: continue the last message, which must be the assistant's; default False.
            template_arguments (or chat_template_kwargs): other variables of the template, as a dictionary.

        Raises:
            TemplateError: the template refuses. Also what `generate` raises.
        """
        self._engine.loop.check_open()
        n = 1 if is_one(messages) else len(messages)
        chosen = either(params, sampling_params, self._chats.params)
        asked = self._engine.processor.ask_all(n, chosen, request_id)
        prompts = self._chats.prompts(messages, **options)
        outputs = parsed(prompts, asked, self._answer(prompts, with_formats(prompts, asked)))
        return outputs[0] if is_one(messages) else outputs

    @checked(ChatOptions, params=SamplingParams)
    def chat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> Generator[StreamPiece, None, None]:
        """Answer one conversation as `chat` does; yield a piece with deltas for each token."""
        self._engine.loop.check_open()
        param = for_each(either(params, sampling_params, self._chats.params), 1)[0]
        asked = self._engine.processor.ask(param, request_id, timed=False)
        prompt = self._chats.one(messages, **options)
        return self._stream(prompt, prompt.params(param), asked, prompt.reader(param).read)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a chat for which none are given.

        Its temperature, top_k, top_p, min_p and repetition_penalty come from the model file's metadata
        `general.sampling.*`, else temperature=0.7 and top_p=0.95. An answer ends when the model ends it, or
        when the context is full.
        """
        self._engine.loop.check_open()
        return self._chats.params

    @checked(ChatOptions)
    def chat_prompt(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> tuple[int, ...]:
        """Return the token ids that `chat` would answer."""
        self._engine.loop.check_open()
        return tuple(self._chats.one(messages, **options))

    @checked(params=BeamSearchParams)
    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams | None = None
    ) -> list[RequestOutput]:
        """Search the likeliest answers to each prompt; return them with their logprobs, the best first.

        Beams share the blocks of their common prefix. Raise as `generate` does.
        """
        self._engine.loop.check_open()
        return run_steps(self._engine.loop, search(self._engine, listed(prompts), params))

    @checked()
    def session(self, prompt: Prompt = (), *, cache_salt: str = "", lora: str | None = None) -> Session:
        """Return a `Session`: text to continue and to fork. Nothing is computed yet.

        All its answers use the adapter `lora`, as in `SamplingParams`.

        Raises:
            RequestError, OutOfBlocks: the prompt is invalid, or too long for the context or the cache.
        """
        self._engine.loop.check_open()
        return Session(self._engine, self._engine.processor.sequence(prompt, cache_salt, lora))

    @checked()
    def load_session(self, name: str, *, cache_salt: str = "") -> Session:
        """Return the session that `Session.save` saved with this salt; its blocks come from the KV store.

        Raises: RequestError if there is none, or its adapter is not loaded; as `Session.save`.
        """
        return Session(self._engine, load_sequence(self._engine, name, cache_salt)[0])

    @checked()
    def delete_session(self, name: str, *, cache_salt: str = "") -> bool:
        """Delete a saved session, and return whether there was one; raise as `Session.save`."""
        return delete_session(self._engine, name, cache_salt)

    @checked()
    def purge_kv_store(self, cache_salt: str | None = None) -> int:
        """Delete what the KV store has of a salt's owner, the part before its first colon, or all."""
        return purge(self._engine, cache_salt)

    def abort(self, request_id: str | Iterable[str]) -> None:
        """End the requests of this id, or of these ids, with the text that they have.

        Their `finish_reason` is "abort". The id of a call with several prompts ends all of them. Any thread
        may call this, also in the loop over a stream. Ids of no request, or of ended ones, are ignored.

        Raises:
            RequestError: an id is not a string of 1 to 256 characters.
        """
        self._engine.abort(request_id)

    # ---- vectors ----

    @checked()
    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        lora: str | None = None,
    ) -> NDArray[np.float32]:
        """Return a vector for each text: float32 [n, info.n_embd_out]. The first call creates the context.

        Args:
            texts: text or token ids, one or a list. Each has up to n_ctx tokens, and at most as many as the
                model was trained on.
            pooling: of the vectors of the tokens: "mean", "cls" (the first) or "last"; None: the model's own.
            normalize: give each vector a length of 1.
            lora: name of an adapter, as in `SamplingParams`.

        Raises:
            RequestError: a text is empty or too long, or neither the model nor `pooling` names a pooling.
            UnsupportedError, OutOfMemory, ComputeError: the vectors cannot be computed.
        """
        return self._engine.embeddings.embed(texts, pooling, normalize, lora=lora)

    # ---- adapters ----

    @checked()
    def load_lora(self, name: str, path: str | os.PathLike[str], scale: float = 1.0) -> LoraInfo:
        """Load a LoRA adapter, with `scale` as the factor of its product. Raise ConfigError for a name in
        use, ModelError or UnsupportedError for a file that does not fit, OutOfMemory."""
        return self._engine.loras.load(lora_setting(name, path, scale))

    @checked()
    def unload_lora(self, name: str) -> None:
        """Unload an adapter. Raise RequestError if requests use it; its sessions can no longer answer."""
        self._engine.loras.unload(name)

    # ---- text ----

    @checked()
    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text; add_special: with the model's tokens around it, as in `generate`;
        parse_special: with control tokens for their names in the text."""
        self._engine.check_open()
        return self._engine.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    @checked()
    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids, U+FFFD for bytes that are not UTF-8; special: with control tokens."""
        self._engine.check_open()
        return self._engine.model.detokenize(tokens, special=special).decode("utf-8", "replace")

    # ---- properties and statistics ----

    @property
    def chat_template(self) -> ChatTemplate:
        """Template of `chat`: the model's own, or a fallback (see its `name`)."""
        return self._chats.template

    def stats(self) -> EngineStats:
        """Return blocks, bytes, tokens and times, exact between two steps."""
        return self._engine.stats()

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Record the cache's work in a file, for `pyvelo report` and `pyvelo simulate`, but no text:
        `with llm.trace("run.trace"): ...`. Raise ConfigError during another recording."""
        engine = self._engine
        return recording(engine.loop, path, engine.geometry.block_bytes, engine.pool.n_ctx)

    def reset_prefix_cache(self) -> None:
        """Remove all prefixes from the cache; blocks that no sequence holds become free."""
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Cancel all requests and free model and cache; may be called twice."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(
        self, prompts: Sequence[Prompt], asked: AskedOfAll, return_errors: bool = False
    ) -> list[RequestOutput]:
        submissions = self._engine.processor.prepare_all(prompts, asked)
        run_all(self._engine.loop, submissions)
        return outputs_of(submissions, return_errors)

    def _stream(self, prompt: Prompt, params: SamplingParams, ask: Asked, read: Read | None = None) -> Stream:
        pieces: deque[StreamPiece] = deque()
        submission = self._engine.processor.prepare(prompt, params, pieces.append, ask)
        return Stream(self._engine.loop, lambda: submission, pieces, engine=self._engine, read=read)
