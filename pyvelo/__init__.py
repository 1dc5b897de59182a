"""PyVelo: quantized GGUF models from Python, on a llama.cpp whose KV cache is paged."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyvelo._version import __version__
from pyvelo.errors import (
    ArgumentError,
    Cancelled,
    ClosedError,
    ComputeError,
    ConfigError,
    EngineError,
    InternalError,
    LibraryError,
    ModelError,
    OutOfBlocks,
    OutOfMemory,
    PromptTooLong,
    RequestError,
    StoreError,
    TemplateError,
    TraceError,
    UnsupportedError,
    VeloError,
)
from pyvelo.outputs import (
    Completion,
    Delta,
    FinishReason,
    LoraInfo,
    Pooling,
    RequestOutput,
    RequestTimes,
    StreamPiece,
    TokenLogprob,
    ToolCall,
    Usage,
)
from pyvelo.sampling import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from pyvelo.async_llm import AsyncLLM
    from pyvelo.chat.conversation import ChatOptions
    from pyvelo.chat.messages import Message
    from pyvelo.config import GpuLayers, KVTypes, LoraGiven, Precision
    from pyvelo.engine.stats import EngineStats
    from pyvelo.kv.types import KVType
    from pyvelo.kv_events import KVEvents
    from pyvelo.kv_store import KVStore
    from pyvelo.llm import LLM
    from pyvelo.session import AsyncSession, Session

__all__ = [
    "LLM",
    "ArgumentError",
    "AsyncLLM",
    "AsyncSession",
    "BeamSearchParams",
    "Cancelled",
    "ChatOptions",
    "ClosedError",
    "Completion",
    "ComputeError",
    "ConfigError",
    "Delta",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "GpuLayers",
    "InternalError",
    "KVEvents",
    "KVStore",
    "KVType",
    "KVTypes",
    "LibraryError",
    "LoraGiven",
    "LoraInfo",
    "Message",
    "ModelError",
    "OutOfBlocks",
    "OutOfMemory",
    "Pooling",
    "Precision",
    "PromptTooLong",
    "RequestError",
    "RequestOutput",
    "RequestTimes",
    "SamplingParams",
    "Session",
    "StoreError",
    "StreamPiece",
    "TemplateError",
    "TokenLogprob",
    "ToolCall",
    "TraceError",
    "UnsupportedError",
    "Usage",
    "VeloError",
    "__version__",
]


_LAZY = {
    "LLM": "pyvelo.llm",
    "AsyncLLM": "pyvelo.async_llm",
    "AsyncSession": "pyvelo.session",
    "ChatOptions": "pyvelo.chat.conversation",
    "EngineStats": "pyvelo.engine.stats",
    "GpuLayers": "pyvelo.config",
    "KVType": "pyvelo.kv.types",
    "KVEvents": "pyvelo.kv_events",
    "KVStore": "pyvelo.kv_store",
    "KVTypes": "pyvelo.config",
    "LoraGiven": "pyvelo.config",
    "Message": "pyvelo.chat.messages",
    "Precision": "pyvelo.config",
    "Session": "pyvelo.session",
}
"""Modules of the names that need the compiled library or take long to import."""


def __getattr__(name: str) -> Any:
    """Import a name when it is first needed."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
