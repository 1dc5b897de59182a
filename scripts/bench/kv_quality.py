"""Measure the quality that quantized pages cost: the next-token distribution against that over f16 pages.

    python scripts/bench/kv_quality.py model.gguf text.txt
    python scripts/bench/kv_quality.py model.gguf text.txt --kv-type q8_0 q4_0 --context 2048

Cuts the text into pieces of --context tokens. For every position of a piece except the first --skip, takes
the Kullback-Leibler divergence of the distribution over these pages from that over f16 pages, in nats. The
table shows its mean, median and 99th percentile, and how often both have the same most likely token. A model
with random weights gives no useful figure.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo.kv.types import KV_TYPES
from scripts._common import run_main
from tests.e2e.paged import PagedRunner

BATCH, BLOCK = 256, 32


@dataclass(frozen=True)
class Result:
    """Divergence in nats over `positions` positions; `same_top` is a fraction of 1."""

    kv_type: str
    positions: int
    mean: float
    median: float
    p99: float
    same_top: float


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return the log softmax over the last axis, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def divergence(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return sum p (log p - log q) over the last axis, p being the reference's softmax."""
    p, q = log_softmax(reference), log_softmax(other)
    return np.asarray((np.exp(p) * (p - q)).sum(-1))


def logits_of(runner: PagedRunner, tokens: list[int]) -> Iterator[npt.NDArray[np.float32]]:
    """Yield logits [up to BATCH, vocabulary] for every batch of one sequence."""
    sequence = runner.sequence()
    for at in range(0, len(tokens), BATCH):
        yield runner.step([(sequence, tokens[at : at + BATCH])], every=True)
    runner.free.extend(sequence.table)


def compare(model: Path, pieces: list[list[int]], kv_type: str, skip: int, threads: int) -> Result:
    """Run both types over the same pieces and return the divergence."""
    longest = max(map(len, pieces))
    runners = [
        PagedRunner(
            model,
            type_k=KV_TYPES[name].id,
            type_v=KV_TYPES[name].id,
            n_blocks=-(-longest // (8 * BLOCK)) * 8,  # the pool's size is a multiple of 8
            block_size=BLOCK,
            max_batch_tokens=BATCH,
            max_seqs=1,
            max_seq_len=longest,
            n_threads=threads,
        )
        for name in ("f16", kv_type)
    ]
    with runners[0] as reference, runners[1] as quantized:
        found, same = [], []
        for piece in pieces:
            pairs = zip(logits_of(reference, piece), logits_of(quantized, piece), strict=True)
            both = [(divergence(a, b), a.argmax(-1) == b.argmax(-1)) for a, b in pairs]
            found.append(np.concatenate([d for d, _ in both])[skip:])
            same.append(np.concatenate([s for _, s in both])[skip:])
    d, top = np.concatenate(found), np.concatenate(same)
    mean, median, p99 = float(d.mean()), float(np.median(d)), float(np.quantile(d, 0.99))
    return Result(kv_type, len(d), mean, median, p99, float(top.mean()))


def pieces_of(model: Path, text: Path, context: int, most: int, special: bool = False) -> list[list[int]]:
    """Tokenize the text and cut it into pieces; a shorter rest is dropped."""
    from pyvelo.native import Model

    with Model(model) as opened:
        tokens = list(opened.tokenize(text.read_text(encoding="utf-8"), parse_special=special))
    pieces = [tokens[i : i + context] for i in range(0, len(tokens) - context + 1, context)]
    if not pieces:
        raise SystemExit(f"{text} has {len(tokens)} tokens: give more text, or a --context of at most that")
    return pieces[:most]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("text", type=Path, help="text of the kind that the model was trained for, in UTF-8")
    parser.add_argument("--kv-type", nargs="+", choices=KV_TYPES, default=[t for t in KV_TYPES if t != "f16"])
    parser.add_argument("--context", type=int, default=1024, help="tokens of a piece")
    parser.add_argument(
        "--skip", type=int, default=32, help="positions at the start of a piece that are not measured"
    )
    parser.add_argument("--pieces", type=int, default=20, help="at most this many")
    parser.add_argument(
        "--special", action="store_true", help="parse special tokens of a chat in the text, such as <|user|>"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_intermixed_args()
    pieces = pieces_of(given.model, given.text, given.context, given.pieces, given.special)
    results = [compare(given.model, pieces, kv, given.skip, given.threads) for kv in given.kv_type]
    if given.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return 0
    print(f"{given.model.name}, {len(pieces)} pieces of {len(pieces[0])} tokens\n")
    print("| KV | mean KL | median | 99th percentile | same first choice |")
    print("|---|---:|---:|---:|---:|")
    for r in results:
        print(f"| {r.kv_type} | {r.mean:.2e} | {r.median:.2e} | {r.p99:.2e} | {r.same_top:.2%} |")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
