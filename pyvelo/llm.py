"""The blocking face: answers from a GGUF model, over a paged KV cache."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, overload

from pyvelo.beam_search import search
from pyvelo.chat.conversation import ChatOptions, Chats, is_one
from pyvelo.chat.messages import Message
from pyvelo.chat.template import ChatTemplate
from pyvelo.config import EngineConfig
from pyvelo.engine.engine import open_engine
from pyvelo.engine.input_processor import Prompt, for_each, pair_up
from pyvelo.engine.loop import Stream, run_all, run_steps
from pyvelo.engine.stats import EngineStats
from pyvelo.keywords import NotCopied, checked, either
from pyvelo.kv.geometry import Geometry
from pyvelo.outputs import RequestOutput, StreamPiece, raise_first_error
from pyvelo.sampling import BeamSearchParams, SamplingParams
from pyvelo.session import Session
from pyvelo.trace.recorder import recording

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from pyvelo.native import ModelInfo, VocabInfo

__all__ = ["LLM"]


class LLM(NotCopied):
    """A GGUF model and its cache. Usable from several threads at once; their requests share every step.

    Of a model that only embeds (BERT and its kin) there is no cache: `embed` works, and what generates raises
    UnsupportedError.

    model: path of the GGUF file, of the first one where it is in several; or a name on the hub, such as
        "org/repo:Q4_K_M" (see pyvelo.models.hub.locate), which takes the extra `hub`.
    kv_type: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl, or a pair of them for K and V.
    block_size: tokens in a block: 32, 64, 128 or 256; raised where a GPU needs it.
    kv_cache_bytes: memory for the cache. None: enough for four sequences of n_ctx tokens (of 8192 where n_ctx
        is None) and for 8192 tokens, but no more than 2 GiB unless a single sequence of n_ctx (or 4096)
        tokens needs more.
    memory_utilization: without kv_cache_bytes, weights and cache together take at most this share of the
        memory that is free now.
    n_ctx: longest sequence in tokens, prompt and answer; None: what the model was trained on, as far as the
        cache holds it.
    max_num_seqs: sequences that run at once; at most max_batch_tokens, and with recurrent layers as many as
        have their states in 1 GiB. The others wait.
    max_batch_tokens: tokens of one step; longer prompts run in pieces.
    n_threads: threads that compute. None: one for each performance core that the process may run on, but no
        more than its CPU quota (`pyvelo info` shows both).
    n_gpu_layers: layers on GPUs, the last ones first, the output among them; -1: all; "auto": as many as fit
        beside the cache, and 0 without a GPU.
    prefix_cache: sequences that begin alike share the blocks of their beginning, also with those that ended
        (but with recurrent layers, whose states are not in blocks).
    swap_bytes: host memory beside the cache, for sequences that must give way while blocks are scarce; what
        finds no room there, or is quicker to compute, is computed again (and with recurrent layers always).
    deterministic: the same tokens whether a request runs alone or beside others.
    attention_precision: "exact" rounds attention no more than stock does; "fast" may round the products of a
        prompt to bfloat16, whatever the type.
    seed: of the draws of requests that bring none.
    progress: called while the model is loaded, with the share that is there, 0..1. Where weights are packed
        for this processor, the first step does that, and calls it again from 0 to 1, in the thread that
        computes. What it raises ends the load, or the requests of the step; it must not use the LLM.

    max_model_len, max_num_batched_tokens: other names of n_ctx and max_batch_tokens, as vLLM has them.

    Raises ConfigError, ModelError, UnsupportedError or OutOfMemory.
    """

    _instead = "threads may share it; another process opens its own"

    @checked(params=SamplingParams)
    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        kv_type: str | Sequence[str] = "f16",
        block_size: int = 32,
        kv_cache_bytes: int | None = None,
        memory_utilization: float = 0.9,
        n_ctx: int | None = None,
        max_num_seqs: int = 256,
        max_batch_tokens: int = 512,
        n_threads: int | None = None,
        n_gpu_layers: int | str = "auto",
        prefix_cache: bool = True,
        swap_bytes: int = 0,
        deterministic: bool = False,
        attention_precision: str = "exact",
        seed: int | None = None,
        progress: Callable[[float], object] | None = None,
        max_model_len: int | None = None,
        max_num_batched_tokens: int | None = None,
    ) -> None:
        self._engine = open_engine(
            EngineConfig(
                model=model,
                kv_type=kv_type,
                block_size=block_size,
                kv_cache_bytes=kv_cache_bytes,
                memory_utilization=memory_utilization,
                n_ctx=n_ctx,
                max_num_seqs=max_num_seqs,
                max_batch_tokens=max_batch_tokens,
                n_threads=n_threads,
                n_gpu_layers=n_gpu_layers,
                prefix_cache=prefix_cache,
                swap_bytes=swap_bytes,
                deterministic=deterministic,
                attention_precision=attention_precision,
                seed=seed,
                progress=progress,
                max_model_len=max_model_len,
                max_num_batched_tokens=max_num_batched_tokens,
            )
        )
        self._chats = Chats(self._engine.model)

    # ---- answers ----

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
            params: for all prompts, or one for each; sampling_params is another name of it, as in vLLM.
            request_id: name in the output (None: a unique one); of several prompts, i gets "request_id-i".
            return_errors: put the error of a request that fails into its output. Else it is raised when the
                other requests have finished.

        Raises:
            RequestError, OutOfBlocks: a prompt can never be served; then none of them starts.
        """
        engine = self._engine
        engine.loop.check_open()
        processor = engine.processor
        asked = processor.ask_all(prompts, either(params, sampling_params), request_id)
        submissions = [processor.prepare(prompt, param, asked=each) for prompt, param, each in asked]
        run_all(engine.loop, submissions)
        outputs = [submission.output() for submission in submissions]
        if not return_errors:
            raise_first_error(outputs)
        return outputs

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
        engine = self._engine
        engine.loop.check_open()
        pieces: deque[StreamPiece] = deque()
        processor, param = engine.processor, for_each(either(params, sampling_params), 1)[0]
        asked = processor.ask(param, request_id, timed=False)
        submission = processor.prepare(prompt, param, pieces.append, asked)
        return Stream(engine.loop, lambda: submission, pieces, engine=engine)

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

        Control tokens are those that the template writes; their names in a content are text.

        Args:
            messages: dictionaries with role and content, or a list of such lists. An empty list is a list of
                no conversations.
            params: for all conversations, or one for each; None: `get_default_sampling_params`.
            request_id: as in `generate`.
            options: tools and templates, see `ChatOptions`.

        Returns:
            Outputs whose `prompt` is the conversation as the template wrote it.

        Raises:
            TemplateError: the template refuses. Also what `generate` raises.
        """
        self._engine.loop.check_open()
        prompts = self._chats.prompts(messages, **options)
        chosen: SamplingParams | Sequence[SamplingParams] = either(
            params, sampling_params, self._chats.params
        )
        outputs = self.generate(prompts, chosen, request_id=request_id)
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
        """Answers one conversation as `chat` does, a piece for every token, as `stream` does."""
        self._engine.loop.check_open()
        prompt = self._chats.one(messages, **options)
        param = either(params, sampling_params, self._chats.params)
        return self.stream(prompt, param, request_id=request_id)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a chat for which none are given.

        Its temperature, top_k, top_p, min_p and repetition_penalty are those of the metadata
        `general.sampling.*` in the model's file, else temperature=0.7 and top_p=0.95. An answer ends where
        the model ends it, or when the context is full.
        """
        self._engine.loop.check_open()
        return self._chats.params

    @checked(ChatOptions)
    def chat_prompt(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> tuple[int, ...]:
        """The token ids that `chat` would answer."""
        self._engine.loop.check_open()
        return tuple(self._chats.one(messages, **options))

    @checked(params=BeamSearchParams)
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | None = None,
    ) -> list[RequestOutput]:
        """The best answers to each prompt that a search of a certain width finds, the best first.

        Every answer brings its logprobs. Beams share the blocks of what they have in common. Raises as
        `generate` does.
        """
        engine = self._engine
        engine.loop.check_open()
        listed = [prompt for prompt, _ in pair_up(prompts, None)]
        return run_steps(engine.loop, search(engine, listed, params))

    @checked()
    def session(self, prompt: Prompt = (), *, cache_salt: str = "") -> Session:
        """A sequence to go on from, and to fork: see `Session`. Nothing is computed yet.

        Raises RequestError where the prompt is none or too long, OutOfBlocks where the cache cannot hold it.
        """
        self._engine.loop.check_open()
        return Session(self._engine, self._engine.processor.sequence(prompt, cache_salt))

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
        pooling: str | None = None,
        normalize: bool = True,
    ) -> NDArray[np.float32]:
        """A vector for each text (text or token ids, one or a list): float32 [n, info.n_embd_out].

        `pooling` makes it of the vectors of the text's tokens: "mean", "cls" (the first) or "last"; None:
        what the model's file says. `normalize` gives it a length of 1. A text is read whole: up to n_ctx
        tokens, and no more than the model was trained on. The context for it is made with the first.

        Raises RequestError where a text is empty or too long, or where the model names no pooling and
        `pooling` neither; UnsupportedError where the model has no embeddings; OutOfMemory, ComputeError.
        """
        return self._engine.embeddings.embed(texts, pooling, normalize)

    # ---- text ----

    @checked()
    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text; add_special: with what the model expects in front, as `generate` does it;
        parse_special: names of control tokens in the text become those tokens."""
        self._engine.check_open()
        return self._engine.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    @checked()
    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids; special: with control tokens by name. What is not UTF-8 becomes U+FFFD."""
        self._engine.check_open()
        return self._engine.model.detokenize(tokens, special=special).decode("utf-8", "replace")

    # ---- what it is ----

    @property
    def chat_template(self) -> ChatTemplate:
        """The template of `chat`: the model's own, or a fallback that is known by its `name`."""
        return self._chats.template

    @property
    def info(self) -> ModelInfo:
        """Architecture and sizes of the model."""
        return self._engine.model.info

    @property
    def vocab(self) -> VocabInfo:
        """Size of the vocabulary and its special tokens."""
        return self._engine.model.vocab

    @property
    def geometry(self) -> Geometry:
        """Types and bytes of the cache."""
        return self._engine.geometry

    @property
    def n_ctx(self) -> int:
        """Longest sequence in tokens, prompt and answer; longest text of a model that only embeds."""
        return self._engine.n_ctx

    def stats(self) -> EngineStats:
        """Blocks, bytes, tokens and times, exact between two steps."""
        return self._engine.stats()

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Records in a file what the cache does meanwhile, for `pyvelo report` and `pyvelo simulate`:
        `with llm.trace("run.trace"): ...`. No text is recorded. ConfigError while another recording goes on.
        """
        engine = self._engine
        return recording(engine.loop, path, engine.geometry.block_bytes, engine.pool.n_ctx)

    def reset_prefix_cache(self) -> None:
        """Forgets the prefixes of what has ended and of what runs; their blocks become free."""
        self._engine.reset_prefix_cache()

    # ---- life ----

    def close(self) -> None:
        """Cancels what runs and frees model and cache; may be called twice."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
