"""AsyncLLM, the interface for asyncio: the engine steps in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, overload

from pyvelo.beam_search import search
from pyvelo.chat.conversation import ChatOptions, Chats, is_one, parsed, with_formats
from pyvelo.chat.messages import Message
from pyvelo.chat.template import ChatTemplate
from pyvelo.config import EngineConfig, GpuLayers, KVTypes, LoraGiven, Precision, lora_setting
from pyvelo.engine.async_loop import AsyncEngineLoop, open_engine_loop
from pyvelo.engine.engine import Engine
from pyvelo.engine.input_processor import Asked, AskedOfAll, Prompt, for_each, listed
from pyvelo.engine.interrupts import HomeProcess
from pyvelo.engine.output import outputs_of
from pyvelo.engine.stats import EngineStats
from pyvelo.engine_view import EngineView
from pyvelo.errors import ClosedError, EngineError, OutOfMemory
from pyvelo.keywords import checked, either
from pyvelo.kv_events import KVEvents
from pyvelo.kv_store import KVStore
from pyvelo.outputs import LoraInfo, Pooling, RequestOutput, StreamPiece
from pyvelo.sampling import BeamSearchParams, SamplingParams
from pyvelo.session import AsyncSession
from pyvelo.store.saved import delete_session, load_sequence, purge
from pyvelo.threads import in_thread, run_in_thread
from pyvelo.trace.recorder import recording

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

__all__ = ["AsyncLLM"]


class AsyncLLM(EngineView):
    """A GGUF model and its KV cache for asyncio, with the arguments of `LLM`, for one event loop.

    `async with` or the first request loads the model in a thread; after an OutOfMemory the next one tries
    again. Any number of requests may be awaited at once; they share every step. A task that is cancelled, a
    stream that is closed, or an asyncio.timeout that expires ends its request within a step.

    Raises:
        ConfigError: a setting is invalid.
        ModelError, UnsupportedError, OutOfMemory: when the model is loaded.
    """

    _instead = "tasks may share it; another process opens its own"

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
        self._config = EngineConfig(**settings)
        self._home = HomeProcess()
        self._loading: asyncio.Task[AsyncEngineLoop] | None = None
        self._chats: Chats | None = None
        self._closed = threading.Event()

    # ---- generation ----

    @checked(params=SamplingParams)
    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_id: str | None = None,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """Generate as `LLM.generate` does."""
        engine_loop = await self._engine_loop()
        given, chosen = listed(prompts), either(params, sampling_params)
        asked = engine_loop.engine.processor.ask_all(len(given), chosen, request_id)
        return await _answer(engine_loop, given, asked, return_errors)

    @checked(params=SamplingParams)
    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[StreamPiece, None]:
        """Generate from one prompt; yield a piece for each token, as `LLM.stream` does."""
        engine_loop = await self._engine_loop()
        param = for_each(either(params, sampling_params), 1)[0]
        asked = engine_loop.engine.processor.ask(param, request_id)
        async with aclosing(_stream(engine_loop, prompt, param, asked)) as pieces:
            async for piece in pieces:
                yield piece

    @overload
    async def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]: ...

    @overload
    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput: ...

    @checked(ChatOptions, params=SamplingParams)
    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one conversation with an output, or a list of conversations with a list, as `LLM.chat`."""
        engine_loop, chats = await self._engine_loop(), await self._templates()
        n = 1 if is_one(messages) else len(messages)
        chosen = either(params, sampling_params, chats.params)
        asked = engine_loop.engine.processor.ask_all(n, chosen, request_id)
        # in a thread, because a template may be slow
        prompts = await in_thread(partial(chats.prompts, messages, **options))
        outputs = await _answer(engine_loop, prompts, with_formats(prompts, asked))
        outputs = parsed(prompts, asked, outputs)
        return outputs[0] if is_one(messages) else outputs

    @checked(ChatOptions, params=SamplingParams)
    async def chat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[StreamPiece, None]:
        """Answer one conversation; yield a piece with deltas for each token, as `LLM.chat_stream`."""
        engine_loop, chats = await self._engine_loop(), await self._templates()
        param = for_each(either(params, sampling_params, chats.params), 1)[0]
        asked = engine_loop.engine.processor.ask(param, request_id)
        prompt = await in_thread(partial(chats.one, messages, **options))
        reader = prompt.reader(param)
        async with aclosing(_stream(engine_loop, prompt, prompt.params(param), asked)) as pieces:
            async for piece in pieces:
                yield reader.read(piece)

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a chat for which none are given, as `LLM.get_default_sampling_params`."""
        return (await self._templates()).params

    @checked(ChatOptions)
    async def chat_prompt(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions]
    ) -> tuple[int, ...]:
        """Return the token ids that `chat` would answer."""
        chats = await self._templates()
        return tuple(await in_thread(partial(chats.one, messages, **options)))

    @checked(params=BeamSearchParams)
    async def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams | None = None
    ) -> list[RequestOutput]:
        """Search the likeliest answers, as `LLM.beam_search` does."""
        engine_loop = await self._engine_loop()
        return await engine_loop.run_steps(search(engine_loop.engine, listed(prompts), params))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End the requests of this id, or of these ids, as `LLM.abort` does."""
        self._home.check()
        if self._loading is not None and not self._closed.is_set():
            (await self._engine_loop()).abort(request_id)

    @checked()
    async def session(
        self, prompt: Prompt = (), *, cache_salt: str = "", lora: str | None = None
    ) -> AsyncSession:
        """Return an `AsyncSession`, as `LLM.session` does."""
        engine_loop = await self._engine_loop()
        make = partial(engine_loop.engine.processor.sequence, prompt, cache_salt, lora)
        return AsyncSession(engine_loop, await engine_loop.preparer.run(make))

    @checked()
    async def load_session(self, name: str, *, cache_salt: str = "") -> AsyncSession:
        """Return the session that was saved under a name, as `LLM.load_session` does."""
        engine_loop = await self._engine_loop()
        sequence, _ = await in_thread(partial(load_sequence, engine_loop.engine, name, cache_salt))
        return AsyncSession(engine_loop, sequence)

    @checked()
    async def delete_session(self, name: str, *, cache_salt: str = "") -> bool:
        """Delete a saved session, and return whether there was one."""
        engine = (await self._engine_loop()).engine
        return await in_thread(partial(delete_session, engine, name, cache_salt))

    @checked()
    async def purge_kv_store(self, cache_salt: str | None = None) -> int:
        """Delete what the KV store has of a salt, or all, as `LLM.purge_kv_store` does."""
        engine = (await self._engine_loop()).engine
        return await in_thread(partial(purge, engine, cache_salt))

    @checked()
    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        lora: str | None = None,
    ) -> NDArray[np.float32]:
        """Return vectors of texts, as `LLM.embed` does, from a thread; cancelling the task ends it soon."""
        engine_loop = await self._engine_loop()
        stopped = threading.Event()
        try:
            embed = engine_loop.engine.embeddings.embed
            return await in_thread(partial(embed, texts, pooling, normalize, stopped.is_set, lora))
        finally:
            stopped.set()

    @checked()
    async def load_lora(self, name: str, path: str | os.PathLike[str], scale: float = 1.0) -> LoraInfo:
        """Load a LoRA adapter, as `LLM.load_lora` does."""
        loras = (await self._engine_loop()).engine.loras
        return await run_in_thread(partial(loras.load, lora_setting(name, path, scale)))

    @checked()
    async def unload_lora(self, name: str) -> None:
        """Unload an adapter, as `LLM.unload_lora` does."""
        loras = (await self._engine_loop()).engine.loras
        await run_in_thread(partial(loras.unload, name))

    # ---- text ----

    @checked()
    async def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return the token ids of a text, as `LLM.tokenize` does."""
        engine_loop = await self._engine_loop()
        tokenize = engine_loop.engine.model.tokenize
        return await engine_loop.preparer.run(
            partial(tokenize, text, add_special=add_special, parse_special=parse_special)
        )

    @checked()
    async def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids, as `LLM.detokenize` does."""
        engine_loop = await self._engine_loop()
        detokenize = partial(engine_loop.engine.model.detokenize, tokens, special=special)
        return (await engine_loop.preparer.run(detokenize)).decode("utf-8", "replace")

    # ---- properties and statistics ----

    @property
    def chat_template(self) -> ChatTemplate:
        """Template of `chat`, as `LLM.chat_template`. Like all properties, EngineError before the load."""
        return Chats(self._loaded.model).template if self._chats is None else self._chats.template

    async def stats(self) -> EngineStats:
        """Return blocks, bytes, tokens and times, exact between two steps."""
        engine_loop = await self._engine_loop()
        return await in_thread(engine_loop.engine.stats)

    @asynccontextmanager
    async def trace(self, path: str | os.PathLike[str]) -> AsyncGenerator[None, None]:
        """Record the cache's work, as `LLM.trace` does: `async with llm.trace("run.trace"): ...`."""
        engine = (await self._engine_loop()).engine
        run = recording(engine.loop, path, engine.geometry.block_bytes, engine.pool.n_ctx)
        entered = ExitStack()
        try:
            await run_in_thread(partial(entered.enter_context, run))
            yield
        finally:
            await run_in_thread(entered.close)

    async def reset_prefix_cache(self) -> None:
        """Remove all prefixes from the cache, as `LLM.reset_prefix_cache` does."""
        engine_loop = await self._engine_loop()
        await in_thread(engine_loop.engine.reset_prefix_cache)

    # ---- end ----

    async def close(self) -> None:
        """Cancel all requests, which keep their text, and free model and cache; may be called twice."""
        self._closed.set()  # ends a load, too
        loading = self._loading
        if loading is None:
            return
        if loading.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([loading])
        if loading.done() and not loading.cancelled() and loading.exception() is None:
            engine_loop = loading.result()
            engine_loop.engine.stop()  # frees the threads that wait for a step
            await in_thread(engine_loop.close)

    async def __aenter__(self) -> AsyncLLM:
        await self._engine_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _loaded(self) -> Engine:
        """The engine; raises EngineError before the load."""
        loading = self._loading
        if loading is None or not loading.done() or loading.cancelled():
            raise EngineError("the model is not loaded yet: use `async with`, or await a request before")
        return loading.result().engine

    async def _templates(self) -> Chats:
        engine_loop = await self._engine_loop()
        if self._chats is None:
            self._chats = Chats(engine_loop.engine.model)
        return self._chats

    async def _engine_loop(self) -> AsyncEngineLoop:
        self._home.check()
        if self._closed.is_set():
            raise ClosedError("this engine was closed")
        loop = asyncio.get_running_loop()
        if self._loading is None:
            self._loading = loop.create_task(open_engine_loop(self._config, self._closed))
        elif self._loading.get_loop() is not loop:
            raise EngineError(
                "this AsyncLLM belongs to the event loop that used it first: make another one in this loop, "
                "or use it in one asyncio.run"
            )
        loading = self._loading
        try:
            return await asyncio.shield(loading)  # a task that is cancelled does not cancel it for the others
        except OutOfMemory:
            if self._loading is loading:
                self._loading = None  # the next call loads again
            raise


async def _answer(
    engine_loop: AsyncEngineLoop,
    prompts: Sequence[Prompt],
    asked: AskedOfAll,
    return_errors: bool = False,
) -> list[RequestOutput]:
    prepare = partial(engine_loop.engine.processor.prepare_all, prompts, asked)
    submissions = await engine_loop.preparer.run(prepare, [params for params, _ in asked])
    await engine_loop.run(submissions)
    return outputs_of(submissions, return_errors)


def _stream(
    engine_loop: AsyncEngineLoop, prompt: Prompt, params: SamplingParams, asked: Asked
) -> AsyncGenerator[StreamPiece, None]:
    prepare = partial(engine_loop.engine.processor.prepare, prompt, params, asked=asked)
    return engine_loop.pieces(prepare, params)
