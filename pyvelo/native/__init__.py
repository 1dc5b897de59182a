"""Thin wrappers over the compiled module: arrays in, arrays out, statuses as exceptions."""

from .context import Context, ContextInfo, StepArrays, Timings
from .library import Device, LogLevel, devices, release_threads, set_log, system_info
from .model import Layer, Model, ModelInfo, VocabInfo, quantize
from .sampler import Sampler

__all__ = [
    "Context",
    "ContextInfo",
    "Device",
    "Layer",
    "LogLevel",
    "Model",
    "ModelInfo",
    "Sampler",
    "StepArrays",
    "Timings",
    "VocabInfo",
    "devices",
    "quantize",
    "release_threads",
    "set_log",
    "system_info",
]
