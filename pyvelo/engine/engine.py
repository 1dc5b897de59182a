"""Assembly of an engine from its settings: model, context with its pool, core, loop and processor."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NoReturn

from pyvelo.config import EngineConfig
from pyvelo.engine.adapters import GivenLoras, Loras
from pyvelo.engine.embedding import Embeddings, open_embeddings
from pyvelo.engine.input_errors import abort_requests
from pyvelo.engine.input_processor import InputProcessor
from pyvelo.engine.interrupts import InterruptGuard, Load, keep_in_forks
from pyvelo.engine.loop import EngineLoop
from pyvelo.engine.output import new_sampler
from pyvelo.engine.scheduler import StepPlan
from pyvelo.engine.stats import BlockMeter, EngineStats, picture
from pyvelo.engine.step import EngineCore
from pyvelo.errors import Cancelled, InternalError, UnsupportedError
from pyvelo.events.connection import connect, publishing
from pyvelo.events.publisher import Publisher
from pyvelo.finalizer import Finalizer
from pyvelo.kv.adopt import AdoptingManager, AdoptingStates
from pyvelo.kv.geometry import Geometry
from pyvelo.memory.budget import Limits, PoolRequest, PoolSize, size_pool, swap_blocks
from pyvelo.memory.cores import threads_for
from pyvelo.memory.host import free_memory
from pyvelo.memory.offload import Offload, cache_geometry, plan_offload, running_sequences
from pyvelo.models.files import ModelFiles
from pyvelo.models.gguf_parts import part_paths, scan_model
from pyvelo.models.hub import locate
from pyvelo.native import Context, Model, Sampler, StepArrays, reserved_memory, system_info
from pyvelo.native.compute import compute, release_team
from pyvelo.store.base import StoreTotals
from pyvelo.store.opening import open_persistence
from pyvelo.store.persistence import Persistence

__all__ = ["Engine", "open_engine"]

_log = logging.getLogger("pyvelo")


@dataclass(eq=False)
class Generator:
    """Parts of an engine that generate text."""

    context: Context
    geometry: Geometry
    pool: PoolSize
    limits: Limits
    core: EngineCore
    loop: EngineLoop
    processor: InputProcessor
    persistence: Persistence | None


class Engine(Generator):
    """Engine of a face (`LLM`), with everything that it opened. An engine that is dropped frees itself.

    A model that only embeds has no generator: the attributes of one raise UnsupportedError.
    """

    def __init__(
        self,
        model: Model,
        files: ModelFiles,
        embeddings: Embeddings,
        loras: Loras,
        generator: Generator | None,
    ) -> None:
        self.model = model
        self.files = files
        self.embeddings = embeddings
        self.loras = loras
        self.parts = generator
        self.events: Publisher | None = None
        if generator is not None:
            vars(self).update(vars(generator))
            loras.connect(generator.context, generator.loop, generator.processor)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise UnsupportedError for a part that an engine without a generator lacks."""
        if name in Generator.__annotations__:
            arch = self.model.info.arch
            raise UnsupportedError(f"this model ({arch}) embeds texts and generates none: use embed")
        raise AttributeError(name)

    @property
    def n_ctx(self) -> int:
        """Longest sequence in tokens, or longest text."""
        return self.parts.pool.n_ctx if self.parts is not None else self.embeddings.max_tokens

    def close(self) -> None:
        if self.embeddings.home.left:  # its memory is the other process's to free
            self.files.close()
            return
        with self.embeddings.guard:
            if self.parts is not None and self.parts.persistence is not None:
                self.parts.loop.stop(self.parts.context.cancel)
                self.parts.persistence.close()
            self.stop()
            self.embeddings.close()
            if self.parts is not None:
                self.parts.processor.close()
                self.parts.loop.close(self.parts.context.cancel)
                self.parts.context.close()
            self.loras.close()
            self.model.close()
            self.files.close()
            if self.events is not None:
                self.events.close()

    def stop(self) -> None:
        """Refuse new calls and end all that run soon, without waiting for them."""
        self.embeddings.stop()
        if self.parts is not None and not self.parts.context.closed:
            if self.parts.persistence is not None:
                self.parts.persistence.release()
            self.parts.loop.stop(self.parts.context.cancel)

    def publish_events(self, publisher: Publisher) -> None:
        """Publish from now on which blocks are cached; `close` closes the publisher."""
        if self.parts is None:
            self.close()  # `loop` raises
        self.events = publisher
        connect(publisher, self.loop, self.core, self.loras.loaded.adapters)

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End the requests of these ids, now or right after the step in progress; other ids are ignored."""
        self.embeddings.home.check()
        if self.parts is not None and abort_requests(self.parts.processor.parents, request_ids):
            self.parts.loop.cancel_aborted()

    def check_open(self) -> None:
        """Raise ClosedError after `close`, EngineError in a forked process."""
        self.embeddings.check_open()

    def reset_prefix_cache(self) -> None:
        """Remove all prefixes from the cache between two steps; raise ClosedError after `close`."""
        self.loop.check_open()
        with self.loop.visit() as core:
            self.loop.check_open()
            core.manager.reset()

    def stats(self) -> EngineStats:
        """Return statistics between two steps; raise ClosedError after `close`."""
        self.loop.check_open()
        with self.loop.visit():
            self.loop.check_open()
            return self._picture()

    def publish_stats(self, publish: Callable[[EngineStats], None]) -> None:
        """Count the blocks of requests; call `publish`, which must not wait or raise, after each step."""
        core, meter = self.core, BlockMeter(self.core.clock)

        def before_run(plan: StepPlan) -> None:
            if plan.chunks:  # their requests may end in this step
                meter.count(core.running)

        def after_turn() -> None:
            meter.count(core.running)
            publish(self._picture())

        with self.loop.visit():
            core.before_run.append(before_run)
            self.loop.publishers.append(after_turn)
            publish(self._picture())

    def _picture(self) -> EngineStats:
        core, info = self.core, self.context.info
        stored = StoreTotals() if self.persistence is None else self.persistence.totals
        return picture(core.manager, core.counters, core.queues, core.limits, info, self.pool, stored)


def open_engine(config: EngineConfig, stop: threading.Event | None = None) -> Engine:
    """Load the model and allocate the pool; a name on the hub is looked up first.

    Raises:
        ModelError: the file does not exist or cannot be read.
        UnsupportedError: the model cannot be paged.
        ConfigError: an address of `kv_events` cannot be used.
        ConfigError, OutOfMemory: the settings leave no room.
        Cancelled: `stop` was set before the model was loaded.
    """
    with publishing(config) as publisher:
        engine = _open_engine(config, stop)
        if publisher is not None:
            engine.publish_events(publisher)
        return engine


def _open_engine(config: EngineConfig, stop: threading.Event | None) -> Engine:
    path = locate(config.model)
    config = replace(config, n_threads=threads_for(config.n_threads))
    summary = scan_model(path)  # with exact integers, before C opens it
    loras = GivenLoras.of(config, summary)
    with InterruptGuard() as guard:
        files = ModelFiles(part_paths(summary), summary.file_bytes)
        try:
            free_bytes = _free_bytes()
            offload = plan_offload(config, path, summary)
            load = Load(guard, stop or threading.Event())
            engine = _open(path, config, files, free_bytes, offload, load, loras)
        except BaseException:
            files.close()
            raise
        _free_when_dropped(engine)
    return engine


def _free_when_dropped(engine: Engine) -> None:
    """Free the memory of an engine when it is dropped, even if an error still refers to its parts."""
    owners = (engine.model,) if engine.parts is None else (engine.parts.context, engine.model)
    persistence = None if engine.parts is None else engine.parts.persistence
    ends = [] if persistence is None else [partial(persistence.wake.put, False)]
    Finalizer(
        engine, *ends, engine.files.close, *(partial(setattr, each, "_handle", None) for each in owners)
    )
    keep_in_forks(engine)


def _free_bytes() -> int | None:
    """Return the free memory before the weights are loaded, without memory that other models will pack.

    Memory that is mapped, or packed by the first step, would still count as free after the load.
    """
    free = free_memory()
    return None if free is None else max(0, free - reserved_memory())


def _open(
    path: str,
    config: EngineConfig,
    files: ModelFiles,
    free_bytes: int | None,
    offload: Offload,
    load: Load,
    given: GivenLoras,
) -> Engine:
    model = _load(path, config, offload, load)
    try:
        load.guard.raise_hit()
        files.check_loaded()
        embeddings = open_embeddings(config, model, files)
        loras = Loras(model, given.model, embeddings)
        if model.info.is_encoder:
            engine = Engine(model, files, embeddings, loras, None)
            loras.load_given(given)
            return engine
        if model.refusal is not None:
            raise UnsupportedError(model.refusal)
        geometry = cache_geometry(config, path, model, on_gpu=bool(offload.n_gpu_layers))
        offload = offload.with_others(given.n_bytes)
        generator = _assemble(config, model, files, geometry, free_bytes, offload, given.n_bytes)
        try:
            engine = Engine(model, files, embeddings, loras, generator)
            loras.load_given(given)
        except BaseException:
            if generator.persistence is not None:
                generator.persistence.stop()
            generator.context.close()
            raise
        return engine
    except BaseException:
        model.close()
        raise


def _load(path: str, config: EngineConfig, offload: Offload, load: Load) -> Model:
    def watch(share: float) -> bool:
        if config.progress is not None:
            config.progress(share)
        return not load.ended()

    make = partial(
        Model,
        path,
        n_gpu_layers=offload.n_gpu_layers,
        gpu_layers=offload.gpu_layers,
        deterministic=config.deterministic,
        progress=watch,
    )
    try:
        return compute(make, load.stop.set)
    except Cancelled:
        load.guard.raise_hit()
        raise
    finally:
        release_team()


def _assemble(
    config: EngineConfig,
    model: Model,
    files: ModelFiles,
    geometry: Geometry,
    free_bytes: int | None,
    offload: Offload,
    lora_bytes: int,
) -> Generator:
    max_seqs, state_bytes = running_sequences(config, model)
    weights = model.info.size_bytes if offload.host_weights is None else offload.host_weights
    pool = size_pool(
        geometry,
        geometry.layout(config.max_batch_tokens),
        PoolRequest(
            max_num_seqs=max_seqs,
            n_ctx=config.n_ctx,
            n_ctx_train=max(1, model.info.n_ctx_train),
            kv_cache_bytes=config.kv_cache_bytes,
            memory_utilization=config.memory_utilization,
            free_bytes=free_bytes,
            other_bytes=weights + state_bytes + lora_bytes,
            devices=offload.rooms,
        ),
    )
    if 0 < model.info.n_ctx_train < pool.n_ctx:
        trained = model.info.n_ctx_train
        _log.warning("n_ctx=%d is longer than the %d tokens the model was trained on", pool.n_ctx, trained)
    context = _make_context(config, model, geometry, pool.n_blocks, max_seqs, pool.n_ctx)
    try:
        if context.info.block_bytes != geometry.block_bytes:
            raise InternalError(
                f"a block takes {context.info.block_bytes} bytes, {geometry.block_bytes} were computed"
            )
        return _wire(config, model, files, context, geometry, pool, max_seqs)
    except BaseException:
        context.close()
        raise


def _wire(
    config: EngineConfig,
    model: Model,
    files: ModelFiles,
    context: Context,
    geometry: Geometry,
    pool: PoolSize,
    max_seqs: int,
) -> Generator:
    limits = Limits(max_seqs, config.max_batch_tokens)
    width = geometry.layout(config.max_batch_tokens).widest(min(pool.n_ctx, pool.n_tokens))
    core = EngineCore(
        context=context,
        arrays=StepArrays(limits.max_batch_tokens, max_seqs, width, 1, len(geometry.groups)),
        manager=(AdoptingStates if geometry.state_bytes else AdoptingManager)(
            pool.n_blocks,
            geometry.block_size,
            windows=geometry.windows,
            max_chunk=limits.max_batch_tokens,
            state_blocks=geometry.state_blocks,
            share=config.prefix_cache,
            n_swap_blocks=swap_blocks(config.swap_bytes, geometry),
        ),
        limits=limits,
        n_states=context.info.n_states,
        new_sampler=partial(new_sampler, partial(Sampler, model)),
        is_end=cache(model.is_end),
        debug=os.environ.get("VELO_DEBUG") == "1",
        call_run=partial(compute, cancel=context.cancel, at_ctrl_c=True),
        check_files=files.check,
    )
    loop = EngineLoop(core, InterruptGuard())
    return Generator(
        context=context,
        geometry=geometry,
        pool=pool,
        limits=limits,
        core=core,
        loop=loop,
        processor=InputProcessor(model, pool, geometry.layout(limits.max_batch_tokens), config.seed),
        persistence=open_persistence(config, files, loop, core, context, geometry, pool.n_ctx, system_info()),
    )


def _make_context(
    config: EngineConfig, model: Model, geometry: Geometry, n_blocks: int, max_seqs: int, max_seq_len: int
) -> Context:
    return Context(
        model,
        n_blocks=n_blocks,
        block_size=geometry.block_size,
        type_k=geometry.type_k.id,
        type_v=geometry.type_v.id,
        max_batch_tokens=config.max_batch_tokens,
        max_seqs=max_seqs,
        max_seq_len=max_seq_len,
        max_outputs=Limits(max_seqs, config.max_batch_tokens).max_outputs,
        n_threads=config.n_threads or 0,
        deterministic=config.deterministic,
        fast_attention=config.attention_precision == "fast",
        n_swap_blocks=swap_blocks(config.swap_bytes, geometry),
        layer_groups=geometry.layer_groups,
        slot_bytes=0 if model.layers else geometry.slot_bytes,
    )
