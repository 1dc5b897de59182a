"""PyVelo: quantized GGUF models from Python, on a llama.cpp whose KV cache is paged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyvelo.errors import VeloError
from pyvelo.outputs import Completion, RequestOutput, StreamPiece, Usage
from pyvelo.sampling import SamplingParams

if TYPE_CHECKING:
    from pyvelo.async_llm import AsyncLLM
    from pyvelo.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "RequestOutput",
    "SamplingParams",
    "StreamPiece",
    "Usage",
    "VeloError",
    "__version__",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads the compiled library when it is first needed."""
    if name == "LLM":
        from pyvelo.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from pyvelo.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
