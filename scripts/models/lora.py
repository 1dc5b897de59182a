"""Write a LoRA adapter (GGUF) with random weights for a model: for tests, benchmarks and a first try.

    python scripts/models/make.py tiny tiny.gguf --type f32
    python scripts/models/lora.py tiny.gguf adapter.gguf --rank 8
    python scripts/models/lora.py tiny.gguf adapter.gguf --weights 'attn_(q|v)' --type f16 --alpha 16

It changes the matrices of the layers, or those whose name matches --weights. The same arguments give the
same adapter. --merge FILE also writes the model with the adapter's products added, if its weights are f32.
"""

from __future__ import annotations

import argparse
import re
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo.models.gguf_scan import scan
from scripts._common import run_main
from scripts.models.make import add_metadata, import_gguf

Pairs = dict[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]
"""A and B by the name of the weight, in NumPy's order: B @ A has the weight's shape."""

MATRICES = r"blk\.\d+\.(attn_(q|k|v|qkv|output|gate)|ssm_(in|out)|ffn_(gate|up|down)(_exps)?)\.weight"
EMBEDDING = "token_embd.weight"


def random_pairs(model: Path, rank: int, weights: str = MATRICES, seed: int = 0, gain: float = 1.0) -> Pairs:
    """Return A and B for the weights whose whole name matches.

    With `gain` 1 and a scale of 1 the product of B and A is about as large as the weight's change of its
    input. A and B of the token embeddings are swapped, as llama.cpp reads them.
    """
    pairs: Pairs = {}
    for tensor in scan(model).tensors:
        if not re.fullmatch(weights, tensor.name):
            continue
        *experts, n_out, n_in = reversed(tensor.shape)
        rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
        a = rng.standard_normal((*experts, rank, n_in), np.float32) * np.float32(n_in**-0.5)
        b = rng.standard_normal((*experts, n_out, rank), np.float32) * np.float32(gain * rank**-0.5)
        if tensor.name == EMBEDDING:  # rows of A are looked up: (vocabulary, rank); B: (width, rank)
            a, b = b, np.ascontiguousarray(a.T)
        pairs[tensor.name] = a, b
    return pairs


def delta(name: str, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return what a pair adds to the weight, for a scale of 1."""
    if name == EMBEDDING:
        return a.astype(np.float64) @ b.T.astype(np.float64)
    return b.astype(np.float64) @ a.astype(np.float64)


def write_adapter(
    path: Path,
    architecture: str,
    pairs: Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]],
    *,
    alpha: float | None = None,
    type_name: str = "f32",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write an adapter; `metadata` replaces or adds values (None: leave the key out)."""
    gguf = import_gguf()
    keys: dict[str, Any] = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": alpha}
    keys |= metadata or {}
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, {key: value for key, value in keys.items() if value is not None})
    kind = gguf.GGMLQuantizationType[type_name.upper()]
    for name, (a, b) in pairs.items():
        for side, values in (("a", a), ("b", b)):
            wide = gguf.GGML_QUANT_SIZES[kind][0] > values.shape[-1]  # a row shorter than a group
            stored = gguf.GGMLQuantizationType.F16 if wide else kind
            data = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), stored)
            writer.add_tensor(f"{name}.lora_{side}", data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_merged(model: Path, path: Path, pairs: Pairs, scale: float) -> None:
    """Write the model with `scale` times the product of each pair added to its weight, which must be f32."""
    data = bytearray(model.read_bytes())
    for tensor in scan(model).tensors:
        if tensor.name not in pairs:
            continue
        if tensor.type_name != "f32":
            raise SystemExit(f"{tensor.name} is of type {tensor.type_name}: only f32 can be merged")
        added = scale * delta(tensor.name, *pairs[tensor.name])
        weight = np.frombuffer(data, "<f4", added.size, tensor.offset).reshape(added.shape)
        data[tensor.offset : tensor.offset + tensor.n_bytes] = (weight + added).astype("<f4").tobytes()
    path.write_bytes(data)


def architecture_of(model: Path) -> str:
    """Return the architecture of a model."""
    return scan(model).architecture


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="the GGUF to make an adapter for")
    parser.add_argument("out", type=Path, help="the adapter to write")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--weights", default=MATRICES, help="pattern of the names of the weights to change")
    parser.add_argument("--type", default="f32", help="f32, f16, bf16 or q8_0")
    parser.add_argument("--alpha", type=float, help="the product is scaled by alpha / rank; default: by 1")
    parser.add_argument("--gain", type=float, default=1.0, help="size of the products")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--merge", type=Path, help="write the model with the adapter merged")
    args = parser.parse_args()
    pairs = random_pairs(args.model, args.rank, args.weights, args.seed, args.gain)
    if not pairs:
        raise SystemExit(f"{args.model} has no weight that matches {args.weights!r}")
    write_adapter(args.out, architecture_of(args.model), pairs, alpha=args.alpha, type_name=args.type)
    if args.merge is not None:
        write_merged(args.model, args.merge, pairs, args.alpha / args.rank if args.alpha else 1.0)
    print(f"{args.out}: {len(pairs)} weights, {args.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
