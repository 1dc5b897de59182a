"""Write a model of a large shape in seconds, quantized as llama-quantize makes Q4_K_M; gpu/check.py runs it.

    gpu/_model.py PATH

Its matrices repeat some thousands of random blocks: the speed does not depend on their values.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts.models import _shapes
from scripts.models._shapes import Shape, Tensor
from scripts.models._vocab import Vocab, own_vocab
from scripts.models.make import add_metadata, import_gguf

LLAMA_8B = Shape("llama", 32, 4096, 14336, 32, 8, 128, 131072, "none", 500000.0, tied=False)
N_VOCAB = 128256
N_BLOCKS = 1 << 15
"""Blocks that are drawn for each type and width."""

UNUSED = 5
Q4_K, Q6_K = "Q4_K", "Q6_K"
BLOCK = 256  # numbers
# standard deviation of a block's numbers if its factors are 1
SPREAD = {Q4_K: 255.6, Q6_K: 1366.0}


def write_large(path: Path, shape: Shape = LLAMA_8B, n_vocab: int = N_VOCAB) -> None:
    """Write a model of `shape` with a vocabulary padded to `n_vocab`; rows are multiples of 256."""
    gguf = import_gguf()
    vocab = padded(own_vocab(), n_vocab)
    plan = [(tensor, stored_type(tensor, shape.layers)) for tensor in _shapes.tensors(shape, vocab.size)]
    writer = gguf.GGUFWriter(path, shape.arch)
    keys: dict[str, Any] = {
        "general.name": f"random {shape.arch}",
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_Q4_K_M),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }
    add_metadata(writer, {**keys, **_shapes.metadata(shape), **vocab.fields})
    for tensor, name in plan:
        kind = gguf.GGMLQuantizationType[name]
        group, group_bytes = gguf.GGML_QUANT_SIZES[kind]
        n_bytes = int(np.prod(tensor.shape)) // group * group_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), n_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    drawn = dict[tuple[str, int], npt.NDArray[np.uint8]]()
    for tensor, name in plan:
        if name == "F32":
            writer.write_tensor_data(np.full(tensor.shape, tensor.gain, np.float32))
            continue
        width = tensor.shape[-1]
        if (name, width) not in drawn:
            drawn[name, width] = blocks(name, width**-0.5)
        pattern = drawn[name, width]
        writer.write_tensor_data(np.resize(pattern, (int(np.prod(tensor.shape)) // BLOCK, pattern.shape[1])))
    writer.close()


def padded(vocab: Vocab, size: int) -> Vocab:
    """Return the vocabulary with unused tokens at its end."""
    more = range(vocab.size, size)
    fields = dict(vocab.fields)
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], *(f"<unused{i}>" for i in more)]
    fields["tokenizer.ggml.scores"] = [*fields["tokenizer.ggml.scores"], *(-1000.0 for _ in more)]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], *(UNUSED for _ in more)]
    return Vocab(vocab.size + len(more), fields, np.ones(vocab.size + len(more), np.float32))


def stored_type(tensor: Tensor, n_layers: int) -> str:
    """Return the type that Q4_K_M gives a tensor: more bits for the output and some matrices."""
    if tensor.kind not in ("matrix", "embedding"):
        return "F32"
    if tensor.name == "output.weight":
        return Q6_K
    if not tensor.name.endswith(("attn_v.weight", "ffn_down.weight")):
        return Q4_K
    layer, eighth = int(tensor.name.split(".")[1]), n_layers // 8
    more = layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2
    return Q6_K if more else Q4_K


def blocks(name: str, std: float) -> npt.NDArray[np.uint8]:
    """Return [N_BLOCKS, bytes of a block]: random bits with factors that give the standard deviation."""
    draw = np.random.default_rng(len(name))
    factor = np.float16(std / SPREAD[name])
    if name == Q4_K:  # d, dmin, then scales and numbers; a number is d * scale * q - dmin * least
        found = draw.integers(0, 256, (N_BLOCKS, 144), np.uint8)
        found[:, :4] = np.array([factor, np.float16(7.5) * factor], np.float16).view(np.uint8)
    else:  # numbers and scales, then d; a number is d * scale * q
        found = draw.integers(0, 256, (N_BLOCKS, 210), np.uint8)
        found[:, -2:] = np.array([factor], np.float16).view(np.uint8)
    return found


if __name__ == "__main__":
    write_large(Path(sys.argv[1]))
