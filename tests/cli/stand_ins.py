"""Models that cache what real ones do, and have hardly any weights."""

from __future__ import annotations

from pathlib import Path

from tests import forks

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/models/make.py"
# layers, KV heads, head size and context
SHAPES = {
    "qwen3-0.6b": (28, 8, 128, 40960),
    "llama-3.2-1b": (16, 8, 64, 131072),
}
WINDOWED = {"gemma3": (34, 4, 256, 32768)}
MORE = {"gemma3": {"arch": "gemma3", "window": 1024}}


def stand_in(path: Path) -> Path:
    """Writes the one that the file is named after."""
    name = path.name.removesuffix(".gguf")
    layers, heads, size, ctx = (SHAPES | WINDOWED)[name]
    options = {"layers": layers, "heads": heads, "kv-heads": heads, "head-dim": size, "ctx": ctx}
    options |= {"embd": 32, "ffn": 32, **MORE.get(name, {})}
    command = [forks.PYTHON, str(SCRIPT), *(f"--{name}={number}" for name, number in options.items())]
    forks.run([*command, "--type=q8_0", str(path)], check=True)
    return path
