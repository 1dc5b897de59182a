"""The demo model as a GGUF file: matrices in Q8_0, gains in F32, vocabulary and chat template inside."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from scripts.demo._shape import Config, metadata, shapes
from scripts.demo._vocab import Vocab
from scripts.models.make import add_metadata

ARCH = "qwen3"
ABOUT = {
    "general.name": "PyVelo demo",
    "general.description": "A tiny model that shows that PyVelo works; it knows next to nothing.",
    "general.author": "the PyVelo authors",
    "general.license": "mit",
}


def write_gguf(
    path: Path, vocab: Vocab, config: Config, tensors: Mapping[str, npt.NDArray[np.float32]]
) -> None:
    """Write the file, whole or not at all. `tensors` has what shapes(config) names."""
    part = path.with_name(f".{path.name}.part")
    writer = gguf.GGUFWriter(part, ARCH)
    keys: dict[str, Any] = {
        **ABOUT,
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_Q8_0),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        **{f"{ARCH}.{key}": value for key, value in metadata(config).items()},
        **vocab.fields(),
    }
    add_metadata(writer, keys)
    for name, shape in shapes(config).items():
        values = np.asarray(tensors[name], np.float32)
        if values.shape != shape:
            raise ValueError(f"{name} is {values.shape} and should be {shape}")
        matrix = len(shape) == 2 and shape[-1] % 32 == 0
        kind = gguf.GGMLQuantizationType.Q8_0 if matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, path)
