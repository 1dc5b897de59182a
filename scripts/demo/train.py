"""Train the demo model that the package embeds, and write it as GGUF: under an hour on one CPU core.

    pip install '.[train]'
    python scripts/demo/train.py --out demo.gguf
    python scripts/demo/train.py --out demo.gguf --folder run --resume

The training data is generated (see _dialogues.py). Measure the result with scripts/demo/quality.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the GGUF to write")
    parser.add_argument("--folder", type=Path, default=Path("build/demo"), help="for the checkpoint")
    parser.add_argument("--resume", action="store_true", help="continue from the folder's checkpoint")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="CPU time of the training, without evaluations"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--ffn", type=int, default=384)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("train.py: training needs PyTorch: pip install '.[train]'", file=sys.stderr)
        return 1
    from scripts.demo._export import write_gguf
    from scripts.demo._shape import Config
    from scripts.demo._training import Plan, Training
    from scripts.demo._vocab import demo_vocab

    torch.set_num_threads(given.threads)
    given.folder.mkdir(parents=True, exist_ok=True)
    vocab = demo_vocab()
    config = Config(len(vocab), given.width, given.layers, given.ffn)
    training = Training(vocab, config, Plan(minutes=given.minutes, seed=given.seed), given.folder)
    if given.resume:
        training.resume()
    training.run()
    write_gguf(given.out, vocab, config, {n: t.detach().numpy() for n, t in training.tensors.items()})
    print(f"{given.out}: {given.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
