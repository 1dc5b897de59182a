"""Measure the memory of conversations in models whose layers have windows.

    python scripts/bench/windows.py                 computes the table of docs/MEMORY.md for known shapes
    python scripts/bench/windows.py --run           also runs Gemma 3 4B's cache, and counts what fits at once

The table has the bytes of one conversation if all layers keep all tokens, in PyVelo between two steps and in
PyVelo while a chunk of a prompt is computed, and in llama.cpp, whose window caches have a fixed size. `--run`
makes a model with the cache of Gemma 3 4B and small other layers, and runs more sequences than fit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from time import sleep

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo.kv.geometry import contiguous_bytes, make_geometry
from scripts._common import run_main

MIB = 1 << 20
BATCH = 512
LENGTHS = (4096, 32768)


@dataclass(frozen=True)
class Layer:
    """Shape of a layer's cache, as `make_geometry` takes it."""

    layer: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    window: int
    window_type: int
    device: int = 0


@dataclass(frozen=True)
class Shape:
    """Layers of a model. Layer i has no window if i % `period` is `period` - 1, and may have other heads."""

    n_layers: int
    n_head_kv: int
    head_dim: int
    window: int
    period: int
    window_type: int = 1
    full_heads: tuple[int, int] | None = None
    """KV heads, and their size, of a layer without a window; None: as the others."""

    def layers(self) -> list[Layer]:
        return [self._layer(i) for i in range(self.n_layers)]

    def _layer(self, number: int) -> Layer:
        if number % self.period == self.period - 1:
            heads, dim = self.full_heads or (self.n_head_kv, self.head_dim)
            return Layer(number, heads, dim, dim, 0, 0)
        return Layer(number, self.n_head_kv, self.head_dim, self.head_dim, self.window, self.window_type)


SHAPES = {  # from the models' published configurations
    "Gemma 3 4B": Shape(34, 4, 256, 1024, 6),
    "Gemma 3 1B": Shape(26, 1, 256, 512, 6),
    "Gemma 4 26B": Shape(30, 8, 256, 1024, 6, full_heads=(2, 512)),
    "Gemma 4 31B": Shape(60, 16, 256, 1024, 6, full_heads=(4, 512)),
    "gpt-oss-20b": Shape(24, 8, 64, 128, 2),
    "Command R7B (Cohere2)": Shape(32, 8, 128, 4096, 4),
    "Llama 4 Scout": Shape(48, 8, 128, 8192, 4, 2),
}


@dataclass(frozen=True)
class Row:
    """Bytes of one conversation: with all tokens, between two steps, within a chunk, and in llama.cpp."""

    shape: str
    n_tokens: int
    flat: int
    held: int
    peak: int
    stock: int


def rows(kv_type: str) -> list[Row]:
    """Return a row for each shape and length."""
    found = []
    for name, shape in SHAPES.items():
        layers = shape.layers()
        geometry = make_geometry(name, layers, kv_type)
        flat = make_geometry(name, layers, kv_type, windows=False)
        for n in LENGTHS:
            peak = geometry.layout(BATCH).peak_blocks(n) * geometry.block_bytes
            stock = contiguous_bytes(geometry, layers, n, BATCH)
            held = geometry.sequence_bytes(n)
            found.append(Row(name, n, flat.sequence_bytes(n), held, peak, stock))
    return found


def run(name: str, pool_bytes: int, n_tokens: int, n_sequences: int) -> str:
    """Run sequences of `n_tokens` tokens of a shape's cache; return how many ran at once, in words."""
    from pyvelo import LLM, SamplingParams
    from scripts.models._shapes import Shape as ModelShape
    from scripts.models.make import write_model

    shape = SHAPES[name]
    flat = make_geometry(name, shape.layers(), windows=False)
    made = ModelShape(
        arch="gemma3", layers=shape.n_layers, embd=64, ffn=64, heads=4, kv_heads=shape.n_head_kv,
        head_dim=shape.head_dim, ctx=n_tokens, window=shape.window,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gemma3.gguf")
        write_model(made, path, type_name="q8_0", seed=1)
        with LLM(path, n_ctx=n_tokens, kv_cache_bytes=pool_bytes, prefix_cache=False) as llm:
            n_new = min(400, n_tokens // 4)
            prompts = [[10 + i] * (n_tokens - n_new) for i in range(n_sequences)]
            params = SamplingParams(max_tokens=n_new, temperature=0, ignore_eos=True)
            worker = threading.Thread(target=llm.generate, args=(prompts, params))
            worker.start()
            most, preempted = 0, 0
            while worker.is_alive():
                stats = llm.stats()
                most, preempted = max(most, stats.running), stats.preemptions
                sleep(0.05)
            n_flat = pool_bytes // flat.sequence_bytes(n_tokens)
            return (
                f"{most} sequences of {n_tokens:,} tokens ran at once in {pool_bytes / MIB:,.0f} MiB, "
                f"{preempted} preemptions; {n_flat} fit if all layers keep all tokens"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description="memory of conversations in models with windows")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--run", action="store_true", help="run Gemma 3 4B's cache, too")
    parser.add_argument("--bytes", type=int, default=4 << 30, help="of the pool, for --run")
    parser.add_argument("--tokens", type=int, default=8192, help="of a sequence, for --run")
    parser.add_argument("--sequences", type=int, default=20, help="for --run")
    options = parser.parse_args()
    print("| shape | tokens | all, MiB | PyVelo, MiB | within a chunk, MiB | llama.cpp, MiB | ratio |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows(options.kv_type):
        sizes = " | ".join(f"{size / MIB:,.0f}" for size in (row.flat, row.held, row.peak, row.stock))
        print(f"| {row.shape} | {row.n_tokens:,} | {sizes} | {row.peak / row.stock:.3f} |")
    if options.run:
        print(run("Gemma 3 4B", options.bytes, options.tokens, options.sequences))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
