"""LoRA adapters of an engine: load and unload them, and steps that use one adapter each."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from pyvelo.config import EngineConfig, LoraSetting
from pyvelo.engine.embedding import Embeddings
from pyvelo.engine.input_errors import no_lora
from pyvelo.engine.input_processor import InputProcessor
from pyvelo.engine.loop import EngineLoop
from pyvelo.engine.request import Request
from pyvelo.engine.scheduler import StepPlan, schedule
from pyvelo.engine.step import EngineCore
from pyvelo.errors import ConfigError, OutOfMemory, RequestError, UnsupportedError, VeloError, shown
from pyvelo.finalizer import Finalizer
from pyvelo.kv.extra import adapter_key
from pyvelo.memory.host import free_memory
from pyvelo.models.gguf_scan import GgufSummary
from pyvelo.models.hub import locate, parse_name
from pyvelo.models.lora import AdaptedModel, LoraFile, check_lora
from pyvelo.native import Adapter, Context, Model, adapt
from pyvelo.outputs import LoraInfo

__all__ = ["AdapterTurns", "GivenLoras", "Loras"]


class GivenLoras(NamedTuple):
    """Adapters of the settings, checked against the model before anything is loaded."""

    model: AdaptedModel
    settings: list[LoraSetting]
    files: list[LoraFile]
    default: str | None

    @staticmethod
    def of(config: EngineConfig, summary: GgufSummary) -> GivenLoras:
        """Check the adapters of the settings; raise as `check_lora`."""
        model = AdaptedModel.of(summary)
        settings, default = config.loras()
        files = [check_lora(_located(each.path), model) for each in settings]
        return GivenLoras(model, settings, files, default)

    @property
    def n_bytes(self) -> int:
        """Memory of the tensors."""
        return sum(file.n_bytes for file in self.files)


def _located(path: str) -> str:
    """Return the path of an adapter; a name on the hub is looked up, as for a model."""
    return path if parse_name(path) is None else locate(path)


class LoadedLoras:
    """Loaded adapters by name. It refers to no part of the engine, which would make a circle.

    default: name of the adapter of requests that name none; None: they use the model as it is.
    """

    def __init__(self) -> None:
        self.default: str | None = None
        self.adapters: dict[str, tuple[LoraInfo, Adapter]] = {}

    def find(self, name: str | None) -> Adapter | None:
        """Return the adapter of this name; None names the default one, "" none.

        Raises:
            RequestError: no adapter has this name.
        """
        wanted = self.default if name is None else name
        return None if wanted is None or wanted == "" else self.named(wanted)

    def named(self, name: object) -> Adapter:
        """Return the adapter of this name; raise RequestError if there is none."""
        found = self.adapters.get(name) if isinstance(name, str) else None
        if found is None:
            raise no_lora(name, self.adapters)
        return found[1]

    def remove(self, name: str) -> None:
        """Remove an adapter; if it was the default, there is none."""
        del self.adapters[name]
        self.default = None if self.default == name else self.default


class Loras:
    """Loader of the adapters of an engine. Thread-safe."""

    def __init__(self, model: Model, adapted: AdaptedModel, embeddings: Embeddings) -> None:
        self.loaded = LoadedLoras()
        self._model = model
        self._adapted = adapted
        self._embeddings = embeddings
        self._context: Context | None = None
        self._loop: EngineLoop | None = None
        self._processor: InputProcessor | None = None
        self._dropped: dict[str, Finalizer] = {}

    def connect(self, context: Context, loop: EngineLoop, processor: InputProcessor) -> None:
        """Set the parts that generate text; without them the model only embeds."""
        self._context, self._loop, self._processor = context, loop, processor

    @property
    def infos(self) -> dict[str, LoraInfo]:
        """Loaded adapters by name."""
        return {name: info for name, (info, _) in self.loaded.adapters.copy().items()}

    def load_given(self, given: GivenLoras) -> None:
        """Load the adapters of the settings."""
        for setting, file in zip(given.settings, given.files, strict=True):
            self.load(setting, file)
        self.loaded.default = given.default

    def load(self, setting: LoraSetting, file: LoraFile | None = None) -> LoraInfo:
        """Load an adapter between two steps; `file`: it was checked.

        Raises:
            ConfigError: the name is in use.
            ModelError, UnsupportedError: the file does not fit the model.
            OutOfMemory: the tensors do not fit into the free memory.
        """
        self._check_unused(setting.name)
        file = check_lora(_located(setting.path), self._adapted) if file is None else file
        file.check_scale(setting.scale)
        free = free_memory()
        if free is not None and file.n_bytes > free:
            raise OutOfMemory(f"{file.path} takes {file.n_bytes} bytes, but only {free} are free")
        with self._alone() as core:
            self._check_unused(setting.name)
            adapter = self._open(setting, file)
            info = LoraInfo(
                name=setting.name,
                path=file.path,
                scale=setting.scale,
                rank=file.rank,
                n_weights=file.n_weights,
                n_bytes=adapter.n_bytes,
                sha256=file.digest.hex(),
            )
            # when the engine is dropped, an error may still refer to the adapter
            self._dropped[setting.name] = Finalizer(self, partial(setattr, adapter, "_handle", None))
            self.loaded.adapters[setting.name] = info, adapter
            self._use(core)
        return info

    def unload(self, name: str) -> None:
        """Unload an adapter between two steps. Sessions that use it can no longer answer.

        Raises:
            RequestError: no adapter has this name, or requests that have not ended use it.
        """
        with self._alone() as core:
            adapter = self.loaded.named(name)
            n_users = 0 if core is None else core.count(lambda request: request.sequence.adapter is adapter)
            if n_users:
                requests = "1 request uses" if n_users == 1 else f"{n_users} requests use"
                raise RequestError(f"{requests} the adapter {shown(name)}: wait for the end, or abort first")
            self.loaded.remove(name)
            self._dropped.pop(name).detach()
            if self._context is not None:
                adapt(self._context, None)  # it may hold the adapter of its last step
            self._embeddings.drop()
            adapter.close()

    def close(self) -> None:
        """Free all adapters; the model does not run any more."""
        for _, adapter in self.loaded.adapters.values():
            adapter.close()

    def _check_unused(self, name: str) -> None:
        """Raise ConfigError if an adapter has this name, ClosedError after the end of the engine."""
        self._embeddings.check_open()
        if name in self.loaded.adapters:
            raise ConfigError(f"there is an adapter {shown(name)}: unload it, or take another name")

    @contextmanager
    def _alone(self) -> Iterator[EngineCore | None]:
        """Let nothing else run the model, load or unload; yield the core, None if the model only embeds."""
        with ExitStack() as entered:
            # the loop first: it refuses a call from within a step, which would wait for itself
            core = None if self._loop is None else entered.enter_context(self._loop.visit())
            entered.enter_context(self._embeddings.paused())
            self._embeddings.check_open()
            if self._loop is not None:
                self._loop.check_open()
            yield core

    def _open(self, setting: LoraSetting, file: LoraFile) -> Adapter:
        """Load a checked file, and build the largest graphs with it."""
        key = adapter_key(file.digest, setting.scale)
        adapter = Adapter(self._model, file.path, name=setting.name, scale=setting.scale, key=key)
        try:
            file.check_unchanged()
            if self._context is not None:
                adapt(self._context, adapter)
            else:
                self._embeddings.try_adapter(adapter)
        except VeloError as error:
            adapter.close()
            if isinstance(error, UnsupportedError):
                raise UnsupportedError(f"{file.path} does not fit the model: {error}") from None
            raise
        return adapter

    def _use(self, core: EngineCore | None) -> None:
        """Make the engine look for adapters from now on."""
        self._embeddings.find_lora = self.loaded.find
        if self._processor is not None and self._context is not None and core is not None:
            if self._processor.find_lora is None:
                turns = AdapterTurns(partial(adapt, self._context))
                core.schedule = turns.schedule
                core.before_run.append(turns.apply)
            self._processor.find_lora = self.loaded.find


class AdapterTurns:
    """Scheduler of steps with one adapter each: the graph applies an adapter to all tokens of a step.

    The adapters of open requests take turns, and a turn is a step. An adapter whose requests can do nothing
    in its turn is passed over. No adapter starves: each gets one step while each other one gets one.

    No request starves either: the first waiting request that could not start in the last turn of its adapter
    keeps requests of a later rank from starting in the turns of other adapters, which would take the blocks
    that it waits for.

    Args:
        adapt: applies an adapter, or none, to all later steps.
    """

    def __init__(self, adapt: Callable[[Adapter | None], None]) -> None:
        self._adapt = adapt
        self._order: list[Adapter | None] = []  # the adapter of the longest wait first
        self._blocked: dict[Adapter | None, Request] = {}

    def schedule(
        self, waiting: abc.Sequence[Request], running: abc.Sequence[Request], *others: Any
    ) -> StepPlan:
        """Plan a step as `schedule` does, for the requests of one adapter."""
        self._line_up(waiting, running)
        if len(self._order) <= 1:
            self._blocked.clear()
            return schedule(waiting, running, *others)
        blocked = {key: first for key, first in self._blocked.items() if first in waiting}
        for adapter in tuple(self._order):
            bar = min((first.rank for key, first in blocked.items() if key is not adapter), default=None)
            mine = [request for request in waiting if request.sequence.adapter is adapter]
            allowed = [request for request in mine if bar is None or request.rank < bar]
            paused = {request for request in running if request.sequence.adapter is not adapter}
            plan = schedule(allowed, running, *others, paused=paused)
            started = {chunk.request for chunk in plan.starts}
            left = next((request for request in mine if request not in started), None)
            if left is not None:
                blocked[adapter] = left
            if plan.decodes or plan.chunks or plan.evicted or plan.preempted:
                self._order.remove(adapter)
                self._order.append(adapter)
                break
        self._blocked = blocked
        return plan

    def apply(self, plan: StepPlan) -> None:
        """Apply the adapter of the requests of a step; raise ClosedError if it was unloaded."""
        self._adapt(plan.requests[0].sequence.adapter)

    def _line_up(self, *queues: abc.Sequence[Request]) -> None:
        """Update the order of the adapters: new ones join at its end, and ones without requests leave."""
        present = dict.fromkeys(request.sequence.adapter for queue in queues for request in queue)
        self._order = [adapter for adapter in self._order if adapter in present]
        self._order += [adapter for adapter in present if adapter not in self._order]
