"""Run every architecture that upstream's test-llama-archs can make, paged against contiguous.

    python scripts/upstream/architectures.py                    prints the table
    python scripts/upstream/architectures.py --docs             writes docs/ARCHITECTURES.md
    python scripts/upstream/architectures.py --models FOLDER    models that were made before (see --keep)

The weights are wide enough that a wrong block in a table shows; each model is tested for that too. The pool
is full of NaN at first, and blocks lie in random places. The package must be installed with
-C cmake.define.PYVELO_BUILD_TESTS=ON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo.errors import UnsupportedError
from pyvelo.kv.geometry import LONG, make_geometry
from pyvelo.native import Model
from scripts._common import ROOT
from tests.e2e import contiguous
from tests.e2e.paged import PagedRunner, Sequence_, nmse

F32 = 0
CHUNKS = [33, 17, 1, 40, 3]
N_DECODE = 10
N_TOKENS = sum(CHUNKS) + N_DECODE
STDEV = "0.5"  # at upstream's 0.1 attention is nearly uniform, and blind to a swapped block
LIMIT = 1e-6
SEEN = 1e-5  # a wrong block moves the logits by at least this


@dataclass(frozen=True)
class Row:
    """Result of one model: `outcome` is "paged", "refused" or "FAILED".

    share: bytes of a conversation of 32,768 tokens, as a share of the bytes of all tokens in all layers.
    """

    model: str
    arch: str
    kind: str
    outcome: str
    note: str = ""
    error: float | None = None
    batched: float | None = None
    swapped: float | None = None
    share: float | None = None
    same_bits: bool | None = None


def make_models(folder: Path) -> None:
    """Run upstream's test-llama-archs, built from the patched tree, to save its models into `folder`."""
    from scripts.upstream import run_tests

    binary = run_tests.build(["test-llama-archs"]) / "test-llama-archs"
    subprocess.run([str(binary), "-d", STDEV, "-o", str(folder)], check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)  # fmt: skip


def paged_logits(path: Path, tokens: list[int], *, swap: bool = False, n_others: int = 0) -> np.ndarray:
    """Return the logits after each piece of CHUNKS and after each decode step.

    With `swap` the table's last block is replaced by another one of the sequence before the decode, or its
    recurrent state is cleared if no layer has a cache. With others, its state is saved, loaded into another
    one, and copied to a twin that goes on in its place.
    """
    with PagedRunner(path, type_k=F32, type_v=F32, max_seqs=16, n_blocks=128, max_seq_len=512) as runner:
        seq, logits, at = runner.sequence(), [], 0
        others = [runner.sequence() for _ in range(n_others)]
        for step, n in enumerate([*CHUNKS, *[1] * N_DECODE]):
            if swap and step == len(CHUNKS):
                spoil(runner, seq)
            if others and runner.model.info.has_recurrent and step in (2, len(CHUNKS), len(CHUNKS) + 5):
                runner.replace_state(seq)
            if others and step == len(CHUNKS) + 2:
                seq = runner.fork_state(seq)
            beside = [(o, tokens[i : i + max(1, n - i)]) for i, o in enumerate(others)]
            logits.append(runner.step([*beside, (seq, tokens[at : at + n])])[-1])
            at += n
    return np.stack(logits)


def last_logits(path: Path, tokens: list[int], chunks: list[int], n_others: int = 0) -> np.ndarray:
    """Return the logits of the last token in deterministic mode."""
    with PagedRunner(
        path, type_k=F32, type_v=F32, max_seqs=16, n_blocks=128, max_seq_len=512, deterministic=True
    ) as runner:
        seq, at = runner.sequence(), 0
        logits: list[np.ndarray] = []
        others = [runner.sequence() for _ in range(n_others)]
        for n in chunks:
            beside = [(o, tokens[i : i + max(1, n - i)]) for i, o in enumerate(others)]
            logits.append(runner.step([*beside, (seq, tokens[at : at + n])])[-1])
            at += n
    return logits[-1]


def has_same_bits(path: Path, tokens: list[int]) -> bool:
    """Return whether chunks and other sequences change no bit in deterministic mode."""
    whole = last_logits(path, tokens, [len(tokens)])
    cut, ones = [*CHUNKS, N_DECODE], [1] * len(tokens)
    others = (
        last_logits(path, tokens, cut),
        last_logits(path, tokens, cut, 5),
        last_logits(path, tokens, ones),
    )
    return all(np.array_equal(whole, other) for other in others)


def spoil(runner: PagedRunner, seq: Sequence_) -> None:
    """Give a sequence a wrong block, or a wrong state if its blocks hold nothing."""
    if not runner.model.layers:
        runner.context.clear_state(seq.state)
    elif len(seq.table) > 1:
        seq.table[-1] = seq.table[-2]


def worst(expected: np.ndarray, actual: np.ndarray) -> float:
    """Return the largest NMSE of a step; infinite if a logit is not finite."""
    if not np.isfinite(actual).all():
        return float("inf")
    return max(nmse(e, a) for e, a in zip(expected, actual, strict=True))


def kind_of(model: Model) -> str:
    """Return in words what the model caches."""
    layers = model.layers
    parts = ["recurrent states"] if model.info.has_recurrent else []
    if any(layer.head_dim_v == 0 for layer in layers):
        parts.append("latent attention")
    elif layers:
        parts.append("attention")
    windows = {layer.window_type for layer in layers if layer.window}
    parts += ["sliding window"] * (1 in windows) + ["chunked window"] * (2 in windows)
    return ", ".join(parts)


def share_of_memory(model: Model) -> float:
    """Return the bytes of a long conversation, as a share of the bytes of all tokens in all layers."""
    if not model.layers:
        return 0.0
    held, flat = (make_geometry("", model.layers, "f32", windows=windows) for windows in (True, False))
    return held.sequence_bytes(LONG) / flat.sequence_bytes(LONG)


def check(path: Path, library: Path) -> Row:
    """Compare one model, paged alone and batched, with the contiguous path without flash attention."""
    with Model(path) as model:
        row = Row(path.stem, model.info.arch, kind_of(model), "paged")
        if model.refusal is not None:
            return replace(row, outcome="refused", note=model.refusal)
        n_vocab = model.info.n_vocab
        row = replace(row, share=share_of_memory(model))
    tokens = np.random.default_rng(7).integers(0, n_vocab, N_TOKENS).tolist()
    job = contiguous.Job(
        model=str(path), tokens=tokens, chunks=[*CHUNKS, *[1] * N_DECODE], type_k=F32, type_v=F32
    )
    try:
        expected = contiguous.run(library, job).logits
        row = replace(
            row,
            error=worst(expected, paged_logits(path, tokens)),
            batched=worst(expected, paged_logits(path, tokens, n_others=5)),
            swapped=worst(expected[len(CHUNKS) :], paged_logits(path, tokens, swap=True)[len(CHUNKS) :]),
            same_bits=has_same_bits(path, tokens),
        )
    except (UnsupportedError, RuntimeError) as error:
        return replace(row, outcome="FAILED", note=str(error))
    right = row.error is not None and row.batched is not None and max(row.error, row.batched) <= LIMIT
    seen = row.swapped is not None and row.swapped >= SEEN
    return row if right and seen else replace(row, outcome="FAILED")


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def markdown(rows: list[Row]) -> str:
    """Return the text of docs/ARCHITECTURES.md."""
    paged, refused = ([r for r in rows if r.outcome == o] for o in ("paged", "refused"))
    lines = [
        "# Architectures",
        "",
        "This page lists which architectures PyVelo pages, and how exactly each agrees with the",
        "contiguous cache. `python scripts/upstream/architectures.py --docs` writes it. Every model is",
        f"small, with random F32 weights of standard deviation {STDEV} and F32 pages. The figures are",
        "the worst normalised squared error of the logits of a step, over prefill in odd chunks and",
        "decode, against the contiguous cache without flash attention. **Alone** has blocks in random",
        "places of a pool full of NaN. **Batched** has five other sequences in the batch. **Swapped**",
        "decodes with one wrong block in the table, to show that the comparison detects it. Blocks that",
        "a window has left are filled with NaN and given to other sequences. **Memory for 32k** is the",
        "cache of a conversation of 32,768 tokens, as a share of a cache of all tokens in all layers.",
        "**Same bits**: with `deterministic=True` the logits of the last token have the same bits for the",
        "whole prompt at once, in chunks, token by token, and beside other sequences.",
        "",
        f"{len(paged)} models are paged:",
        "",
        "| model | cache | alone | batched | swapped | memory for 32k | same bits |",
        "|---|---|---|---|---|---:|---|",
        *(
            f"| {r.model} | {r.kind} | {figure(r.error)} | {figure(r.batched)} | {figure(r.swapped)} | "
            f"{percent(r.share)} | {'yes' if r.same_bits else 'no'} |"
            for r in paged
        ),
        "",
        f"{len(refused)} are refused when a context is created, with this error:",
        "",
        "| model | why |",
        "|---|---|",
        *(f"| {r.model} | {r.note} |" for r in refused),
        "",
        "A model with recurrent states has one for each running sequence, beside the memory of this table,",
        "and snapshots of states in blocks. In the batch of **Batched**, the state is saved in blocks three",
        "times and loaded into another one, the blocks are filled with NaN, and once a copy of the sequence",
        "goes on in its place. **Swapped** clears the state if no layer has a cache.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="paged against contiguous, for every architecture")
    parser.add_argument("--models", type=Path, help="folder of GGUF models made before")
    parser.add_argument("--keep", type=Path, help="make the models in this folder and leave them there")
    parser.add_argument("--docs", action="store_true", help="write docs/ARCHITECTURES.md")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    import pyvelo

    library = Path(pyvelo.__file__).parent / "native" / "lib" / "libvelo-lab.so"
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.models or args.keep or Path(temporary)
        if args.models is None:
            folder.mkdir(parents=True, exist_ok=True)
            make_models(folder)
        rows = []
        for path in sorted(folder.glob("*.gguf")):
            row = check(path, library)
            rows.append(row)
            print(f"{row.outcome:8} {row.model:30} {figure(row.error):7} {figure(row.batched):7} "
                  f"{figure(row.swapped):7} {row.same_bits!s:5} {row.kind}  {row.note}",
                  flush=True)  # fmt: skip
    if args.docs:
        (ROOT / "docs" / "ARCHITECTURES.md").write_text(markdown(rows))
    if args.json:
        args.json.write_text(json.dumps([row.__dict__ for row in rows], indent=1))
    failed = sum(row.outcome == "FAILED" for row in rows)
    n_paged, n_refused = (sum(r.outcome == o for r in rows) for o in ("paged", "refused"))
    print(f"{n_paged} paged, {n_refused} refused, {failed} failed")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    raise SystemExit(main())
