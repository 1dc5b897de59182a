"""A GPU without one: devices of the laboratory, whose memory the host cannot touch, for tests of offloading.

They stay in a process until it ends, so what uses them runs in a process of its own. `VELO_TEST_LAB_DEVICES`
gives a test run such devices (bytes of each, with commas); `VELO_TEST_GPU_LAYERS` offloads that many layers
of every model that a test loads and says nothing about it, on these or on real GPUs.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyvelo
from pyvelo.config import EngineConfig
from pyvelo.native import Model

LAB_DEVICES = "VELO_TEST_LAB_DEVICES"
GPU_LAYERS = "VELO_TEST_GPU_LAYERS"


class Counts(ctypes.Structure):
    """Counts of all devices so far; `pinned` are bytes of pinned host memory now.

    `shared` counts the blocks that paged attention received as shared by two sequences, layer by layer.
    """

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("graphs", "copies", "reads", "writes", "streams", "pinned", "shared")
    ]

    graphs: int
    copies: int
    reads: int
    writes: int
    streams: int
    pinned: int
    shared: int


@functools.cache
def _library() -> ctypes.CDLL:
    folder = Path(pyvelo.__file__).parent / "native/lib"
    library = ctypes.CDLL(os.environ.get("PYVELO_LAB", os.fspath(folder / "libvelo-lab.so")))
    library.lab_device_add.argtypes = [ctypes.c_int64]
    library.lab_device_add.restype = ctypes.c_char_p
    library.lab_device_count.restype = Counts
    return library


def add_device(n_bytes: int) -> None:
    """Add a device of that many bytes."""
    complaint = _library().lab_device_add(n_bytes)
    assert complaint is None, complaint


def emulate_kernels() -> None:
    """From now on devices compute paged attention with the kernels for GPUs, emulated (native/ops/cuda)."""
    library = _library()
    kernels = ctypes.CDLL(os.fspath(Path(library._name).with_name("libvelo-lab-gpu.so")))
    library.lab_device_attend.argtypes = [ctypes.c_void_p]
    library.lab_device_attend.restype = None
    library.lab_device_attend(ctypes.cast(kernels.lab_paged_attn_emulated, ctypes.c_void_p))


def exhaust(where: int) -> None:
    """From now on computing (1), or waiting (2), fails as on a card with too little memory; 0: neither."""
    _library().lab_device_exhaust(ctypes.c_int32(where))


def counts() -> Counts:
    """Return the counts of the devices."""
    found: Counts = _library().lab_device_count()
    return found


def offload_everything(n_gpu_layers: int) -> None:
    """From now on what is loaded without `n_gpu_layers` gets that many; what is deterministic stays."""
    check: Callable[[EngineConfig], None] = EngineConfig.__post_init__
    init: Callable[..., None] = Model.__init__

    def checked(config: EngineConfig) -> None:
        if config.n_gpu_layers == "auto" and config.deterministic is not True:
            object.__setattr__(config, "n_gpu_layers", n_gpu_layers)
        check(config)

    def load(model: Model, path: Any, **options: Any) -> None:
        if not options.get("deterministic") and not options.get("vocab_only"):
            options.setdefault("n_gpu_layers", n_gpu_layers)
        init(model, path, **options)

    EngineConfig.__post_init__ = checked  # type: ignore[method-assign]
    Model.__init__ = load  # type: ignore[method-assign]


def from_environment() -> None:
    """Add the devices of the environment variables."""
    for n_bytes in filter(None, os.environ.get(LAB_DEVICES, "").split(",")):
        add_device(int(n_bytes))
    if layers := os.environ.get(GPU_LAYERS):
        offload_everything(int(layers))
