"""LoRA adapters of a model."""

from __future__ import annotations

import os
from typing import Final

from ..errors import ClosedError, check_path, shown
from ._ffi import Handle, check, created, ffi, lib
from .context import Context
from .embedder import Embedder
from .model import Model

__all__ = ["Adapter", "adapt"]


class Adapter(Handle):
    """LoRA adapter, loaded for one model; it keeps the weights of the model alive.

    C trusts the file: check it first (pyvelo.models.lora). Load and close adapters while no context and no
    embedder of the model runs. `n_bytes` is the memory of its tensors.

    Args:
        name: of the adapter in errors.
        scale: factor of its product.
        key: bytes that identify file and scale.

    Raises:
        ModelError: the file cannot be read, or does not fit the model.
        OutOfMemory: its tensors do not fit.
        ClosedError: the model was closed.
    """

    def __init__(
        self,
        model: Model,
        path: str | os.PathLike[str],
        *,
        name: str = "",
        scale: float = 1.0,
        key: bytes = b"",
    ) -> None:
        self.name: Final[str] = name
        self.scale: Final[float] = scale
        self.key: Final[bytes] = key
        out = ffi.new("velo_adapter **")
        n_bytes = ffi.new("int64_t *")
        status = lib.velo_adapter_load(model.handle, os.fsencode(check_path(path)), out, n_bytes)
        self._handle = created(status, out, lib.velo_adapter_free)
        self.n_bytes: Final[int] = n_bytes[0]

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"the adapter {shown(self.name)} was unloaded: load it and start again")


def adapt(runner: Context | Embedder, adapter: Adapter | None) -> None:
    """Apply an adapter to all tokens of later runs; None: no adapter.

    The first call with an adapter reserves memory for its largest graphs.

    Raises:
        UnsupportedError: the graph of the architecture cannot apply it to one of its weights.
        ClosedError: the adapter was closed.
    """
    handle, scale = (ffi.NULL, 1.0) if adapter is None else (adapter.handle, adapter.scale)
    if isinstance(runner, Embedder):
        check(lib.velo_embedder_adapt(runner.handle, handle, scale))
    else:
        check(lib.velo_context_adapt(runner.handle, handle, scale))
