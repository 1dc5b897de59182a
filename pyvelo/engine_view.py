"""Properties of a loaded engine, which `LLM` and `AsyncLLM` share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyvelo.keywords import NotCopied

if TYPE_CHECKING:
    from pyvelo.engine.engine import Engine
    from pyvelo.kv.geometry import Geometry
    from pyvelo.native import ModelInfo, VocabInfo
    from pyvelo.outputs import LoraInfo

__all__ = ["EngineView"]


class EngineView(NotCopied):
    """Base of the faces of an engine."""

    _engine: Engine

    @property
    def _loaded(self) -> Engine:
        """The engine; a face that loads it later raises EngineError before."""
        return self._engine

    @property
    def info(self) -> ModelInfo:
        """Architecture and sizes of the model."""
        return self._loaded.model.info

    @property
    def vocab(self) -> VocabInfo:
        """Size of the vocabulary and its special tokens."""
        return self._loaded.model.vocab

    @property
    def geometry(self) -> Geometry:
        """Types and bytes of the cache."""
        return self._loaded.geometry

    @property
    def n_ctx(self) -> int:
        """Longest sequence in tokens, prompt and answer; longest text of a model that only embeds."""
        return self._loaded.n_ctx

    @property
    def loras(self) -> dict[str, LoraInfo]:
        """Loaded LoRA adapters by name."""
        return self._loaded.loras.infos
