"""PyVelo: quantized GGUF models from Python, on a llama.cpp whose KV cache is paged."""

from __future__ import annotations

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
    RequestError,
    TemplateError,
    TraceError,
    UnsupportedError,
    VeloError,
)
from pyvelo.outputs import (
    Completion,
    Delta,
    LoraInfo,
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
    from pyvelo.llm import LLM
    from pyvelo.session import AsyncSession, Session

__all__ = [
    "LLM",
    "ArgumentError",
    "AsyncLLM",
    "AsyncSession",
    "BeamSearchParams",
    "Cancelled",
    "ClosedError",
    "Completion",
    "ComputeError",
    "ConfigError",
    "Delta",
    "EngineError",
    "InternalError",
    "LibraryError",
    "LoraInfo",
    "ModelError",
    "OutOfBlocks",
    "OutOfMemory",
    "RequestError",
    "RequestOutput",
    "RequestTimes",
    "SamplingParams",
    "Session",
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


def __getattr__(name: str) -> Any:
    """Load the compiled library when it is first needed."""
    if name == "LLM":
        from pyvelo.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from pyvelo.async_llm import AsyncLLM

        return AsyncLLM
    if name == "AsyncSession":
        from pyvelo.session import AsyncSession

        return AsyncSession
    if name == "Session":
        from pyvelo.session import Session

        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
