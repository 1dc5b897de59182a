"""Write a GGUF model of any shape with random weights: for tests, benchmarks and a first try.

    python scripts/models/make.py tiny tiny.gguf
    python scripts/models/make.py qwen3-0.6b qwen3.gguf --type Q8_0
    python scripts/models/make.py tiny tiny.gguf --chat-template template.jinja
    python scripts/models/make.py --arch gemma3 --layers 6 --kv-heads 1 --head-dim 256 --type f32 out.gguf

The same arguments give the same weights, whatever the type. Its text is noise, but always the same noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts.models import _shapes, _vocab
from scripts.models._shapes import PRESETS, Shape, Tensor

if TYPE_CHECKING:
    import gguf

DIRECT = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
CHUNK_ELEMENTS = 1 << 22


class MakeError(Exception):
    """Error of a model that cannot be made; the message says why and what would do."""


def write_model(
    shape: Shape,
    path: Path,
    *,
    type_name: str = "f32",
    seed: int = 0,
    std: float = 1.0,
    tree: Path | None = None,
    quantizer: Path | None = None,
    chat_template: str | None = None,
    metadata: Mapping[str, float] | None = None,
) -> None:
    """Write the model of `shape` to `path`, whole or not at all.

    `type_name` is one of DIRECT, or a quantization of llama.cpp such as "Q4_K_M". `std` scales every
    matrix: 1 keeps the activations' magnitude from layer to layer. `tree` is upstream's folder, fetched if a
    vocabulary needs it; `chat_template` is Jinja; `metadata` is stored as 32-bit floats. Raises MakeError,
    _shapes.ShapeError or _vocab.VocabError.
    """
    _shapes.check(shape)
    if not path.parent.is_dir():
        raise MakeError(f"there is no folder {path.parent} to write {path.name} into")
    direct = type_name.lower() in DIRECT
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        part = Path(folder) / "model.gguf"
        stored = type_name.lower() if direct else "f16"
        _write(shape, part, stored, seed, std, tree, chat_template, metadata or {})
        if not direct:
            quantized = Path(folder) / "quantized.gguf"
            quantize(part, quantized, type_name, quantizer)
            part = quantized
        os.replace(part, path)


def _write(
    shape: Shape,
    path: Path,
    type_name: str,
    seed: int,
    std: float,
    tree: Path | None,
    chat_template: str | None,
    metadata: Mapping[str, float],
) -> None:
    gguf = import_gguf()
    vocab = _vocabulary(shape, tree)
    kind = gguf.GGMLQuantizationType[type_name.upper()]
    plan = [(t, _stored_type(t, kind)) for t in _shapes.tensors(shape, vocab.size)]
    writer = gguf.GGUFWriter(path, shape.arch)
    _add_metadata(writer, shape, vocab, kind)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for key, value in metadata.items():
        writer.add_float32(key, value)
    for tensor, stored in plan:
        _add_tensor_info(writer, tensor, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, stored in _shown(plan):
        writer.write_tensor_data(_values(tensor, stored, seed, std, vocab.loudness))
    writer.close()


def _vocabulary(shape: Shape, tree: Path | None) -> _vocab.Vocab:
    if shape.vocab == "none":
        return _vocab.own_vocab()
    return _vocab.upstream_vocab(shape.vocab, tree or _vocab.upstream_tree())


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape, vocab: _vocab.Vocab, kind: Any) -> None:
    import gguf

    file_types = {
        "F32": gguf.LlamaFileType.ALL_F32,
        **{name: gguf.LlamaFileType[f"MOSTLY_{name}"] for name in (d.upper() for d in DIRECT[1:])},
    }
    keys: dict[str, Any] = {
        "general.name": f"random {shape.arch}",
        "general.file_type": int(file_types[kind.name]),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        **_shapes.metadata(shape),
        **vocab.fields,
    }
    add_metadata(writer, keys)


def add_metadata(writer: gguf.GGUFWriter, keys: Mapping[str, Any]) -> None:
    """Write each key with the type that its value has in the file; anything but a scalar is an array."""
    import gguf

    for key, value in keys.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:  # the writer would look at the type of every element
                element = gguf.GGUFValueType.get_type(value[0])
                writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=element)


def _stored_type(tensor: Tensor, kind: Any) -> Any:
    import gguf

    if tensor.kind not in ("matrix", "embedding"):
        return gguf.GGMLQuantizationType.F32
    group = gguf.GGML_QUANT_SIZES[kind][0]
    if tensor.shape[-1] % group:
        raise MakeError(
            f"{tensor.name} has rows of {tensor.shape[-1]}, which {kind.name.lower()} cannot cut "
            f"into groups of {group}; take other widths, or --type f16"
        )
    return kind


def _add_tensor_info(writer: gguf.GGUFWriter, tensor: Tensor, stored: Any) -> None:
    import gguf

    group, group_bytes = gguf.GGML_QUANT_SIZES[stored]
    n_bytes = int(np.prod(tensor.shape)) // group * group_bytes
    writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), n_bytes, raw_dtype=stored)


def _values(
    tensor: Tensor, stored: Any, seed: int, std: float, loudness: npt.NDArray[np.float32]
) -> npt.NDArray[Any]:
    """Return the tensor as it is stored, made in pieces; a row depends on the seed and its place alone."""
    import gguf

    rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    width = tensor.shape[-1]
    rows = int(np.prod(tensor.shape[:-1]))
    scale, offset = _distribution(tensor, std)
    step = max(1, CHUNK_ELEMENTS // width)
    pieces = []
    for row in range(0, rows, step):
        values = rng.standard_normal((min(step, rows - row), width), np.float32)
        values *= np.float32(scale)
        values += np.float32(offset)
        if tensor.kind == "embedding":
            values *= loudness[row : row + len(values), None]
        pieces.append(gguf.quants.quantize(values, stored))
    return np.concatenate(pieces)


def _distribution(tensor: Tensor, std: float) -> tuple[float, float]:
    """Return standard deviation and mean of a tensor's values."""
    match tensor.kind:
        case "norm":
            return 0.1 * tensor.gain, tensor.gain
        case "bias":
            return 0.1 * tensor.gain, 0.0
        case _:
            return std * tensor.gain * float(tensor.shape[-1]) ** -0.5, 0.0


def _shown(plan: list[tuple[Tensor, Any]]) -> Iterator[tuple[Tensor, Any]]:
    for done, item in enumerate(plan, 1):
        if sys.stderr.isatty():
            print(
                f"\r{done}/{len(plan)} tensors",
                end="" if done < len(plan) else "\n",
                file=sys.stderr,
                flush=True,
            )
        yield item


def quantize(source: Path, target: Path, type_name: str, quantizer: Path | None) -> None:
    """Quantize with `quantizer` if given, else the installed library, else llama-quantize."""
    quantizer = quantizer or _quantizer(source, target, type_name)
    if quantizer is None:
        return
    done = subprocess.run(
        [str(quantizer), str(source), str(target), type_name], capture_output=True, text=True, check=False
    )
    if done.returncode != 0 or not target.is_file():
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise MakeError(
            f"{quantizer} could not make {type_name}: {lines[-1] if lines else 'it said nothing'}"
        )


def _quantizer(source: Path, target: Path, type_name: str) -> Path | None:
    """Quantize with the installed library and return None; without one, return the path of llama-quantize."""
    try:
        from pyvelo import VeloError, native
    except ImportError:
        found = shutil.which("llama-quantize")
        if found is None:
            raise MakeError(
                f"--type {type_name} needs PyVelo installed (pip install .) or llama-quantize on the PATH; "
                f"without them there are {', '.join(DIRECT)}"
            ) from None
        return Path(found)
    try:
        native.quantize(source, target, type_name)
    except VeloError as error:
        raise MakeError(f"cannot make {type_name}: {error}") from error
    return None


def import_gguf() -> Any:
    """Import gguf-py: the installed one, else the one in upstream's tree."""
    try:
        import gguf
    except ImportError:
        tree = _vocab.upstream_tree()
        sys.path.append(str(tree / "gguf-py"))
        import gguf
    return gguf


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "preset", nargs="?", choices=PRESETS, help="start from a preset; the options below change it"
    )
    parser.add_argument("out", type=Path, help="the GGUF to write")
    for field in dataclasses.fields(Shape):
        if field.name == "tied":
            continue
        option = "--" + field.name.replace("_", "-")
        kind = {"int": int, "float": float}.get(str(field.type), str)
        parser.add_argument(option, type=kind, help=f"default {field.default}", metavar=kind.__name__.upper())
    parser.add_argument("--untied", action="store_true", help="a separate output matrix, not the embedding")
    parser.add_argument("--type", help=f"{', '.join(DIRECT)}, or a quantization of llama.cpp such as Q4_K_M")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--std", type=float, default=1.0, help="scales every matrix; 1 keeps the activations' magnitude"
    )
    parser.add_argument(
        "--upstream", type=Path, help="a llama.cpp tree; default: what upstream/fetch.py obtains"
    )
    parser.add_argument("--chat-template", type=Path, help="a file with the model's chat template, in Jinja")
    parser.add_argument(
        "--metadata", nargs=2, action="append", default=[], metavar=("KEY", "NUMBER"), help="may be repeated"
    )
    parser.add_argument("--quantizer", type=Path, help="a llama-quantize; default: the installed library")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    shape, type_name = PRESETS[args.preset] if args.preset else (Shape(), "f16")
    changed = {
        f.name: getattr(args, f.name)
        for f in dataclasses.fields(Shape)
        if f.name != "tied" and getattr(args, f.name) is not None
    }
    if args.untied:
        changed["tied"] = False
    try:
        write_model(
            dataclasses.replace(shape, **changed),
            args.out,
            type_name=args.type or type_name,
            seed=args.seed,
            std=args.std,
            tree=args.upstream,
            quantizer=args.quantizer,
            chat_template=args.chat_template and args.chat_template.read_text(encoding="utf-8"),
            metadata={key: float(number) for key, number in args.metadata},
        )
    except (MakeError, _shapes.ShapeError, _vocab.VocabError, OSError) as error:
        print(f"make.py: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
