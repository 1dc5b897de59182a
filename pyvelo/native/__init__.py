"""Thin wrappers over the compiled module: arrays in, arrays out, statuses as exceptions."""

from .adapter import Adapter, adapt
from .arrays import StepArrays
from .context import Context, ContextInfo, DeviceMemory, Timings
from .embedder import POOLINGS, Embedder
from .library import (
    Device,
    DeviceKind,
    LogLevel,
    allowed_cpus,
    count_cores,
    devices,
    product_rate,
    release_threads,
    reserved_memory,
    set_log,
    system_info,
)
from .model import Layer, Model, ModelInfo, VocabInfo, quantize
from .sampler import Sampler

__all__ = [
    "POOLINGS",
    "Adapter",
    "Context",
    "ContextInfo",
    "Device",
    "DeviceKind",
    "DeviceMemory",
    "Embedder",
    "Layer",
    "LogLevel",
    "Model",
    "ModelInfo",
    "Sampler",
    "StepArrays",
    "Timings",
    "VocabInfo",
    "adapt",
    "allowed_cpus",
    "count_cores",
    "devices",
    "product_rate",
    "quantize",
    "release_threads",
    "reserved_memory",
    "set_log",
    "system_info",
]
