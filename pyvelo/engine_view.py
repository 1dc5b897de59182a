"""Properties of a loaded engine, which `LLM` and `AsyncLLM` share."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NoReturn

from pyvelo.keywords import NotCopied

if TYPE_CHECKING:
    from pyvelo.engine.engine import Engine
    from pyvelo.kv.geometry import Geometry
    from pyvelo.native import ModelInfo, VocabInfo
    from pyvelo.outputs import LoraInfo

__all__ = ["EngineView"]

ELSEWHERE = {
    "create_chat_completion": "chat",
    "create_completion": "generate",
    "create_embedding": "embed",
    "encode": "embed",
    "get_metrics": "stats",
    "get_tokenizer": "tokenize",
    "n_vocab": "vocab",
    "reset": "reset_prefix_cache",
    "save_session": "session",
    "save_state": "session",
    "tokenizer": "tokenize",
}
"""Names of vLLM's and llama-cpp-python's LLM, and what does the same here."""


class EngineView(NotCopied):
    """Base of the faces of an engine."""

    _engine: Engine

    @property
    def _loaded(self) -> Engine:
        """The engine; a face that loads it later raises EngineError before."""
        return self._engine

    if not TYPE_CHECKING:  # a type checker takes them for leave to use any name

        def __getattr__(self, name: str) -> NoReturn:
            meant = f": use {ELSEWHERE[name]}" if name in ELSEWHERE else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{meant}", name=name, obj=self
            )

        def __call__(self, *_: object, **__: object) -> NoReturn:
            raise TypeError(f"{type(self).__name__!r} object is not callable: use generate(prompt)")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(self._facts().values())}>"

    def _repr_html_(self) -> str:
        """Return a table of the same facts for a notebook."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{name}</th><td style='text-align:left'>{escape(fact)}</td></tr>"
            for name, fact in self._facts().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"

    def _facts(self) -> dict[str, str]:
        """Return what stays as it is until the end; a step in progress is not waited for, nothing raises."""
        try:
            engine = self._loaded
        except Exception:  # not loaded yet, or never
            return {"state": "not loaded"}
        facts = {"model": engine.model.info.description, "context": f"{engine.n_ctx:,} tokens"}
        if engine.parts is None:
            facts["cache"] = "no KV cache"
        else:
            geometry, n_blocks = engine.parts.geometry, engine.parts.pool.n_blocks
            types = " and ".join(dict.fromkeys([geometry.type_k.name, geometry.type_v.name]))
            facts["cache"] = f"{n_blocks:,} blocks of {geometry.block_size} tokens in {types}"
        return {**facts, "state": "closed"} if engine.model.closed else facts

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
