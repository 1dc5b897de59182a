"""Progress of the training: shares of answers that greedy decoding would give exactly, computed in PyTorch.

An answer is right if each of its tokens is the likeliest after the tokens before it, which greedy decoding
samples. scripts/demo/quality.py measures the final figures in PyVelo.
"""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F

from scripts.demo._about import ABOUT
from scripts.demo._dialogues import Dialogue, held_out, probe
from scripts.demo._model import Tensors, hidden
from scripts.demo._shape import Config
from scripts.demo._vocab import Vocab

SEED = 9_001


def right(config: Config, tensors: Tensors, dialogue: Dialogue, start: int) -> bool:
    """Return whether all trained tokens from `start` on are the likeliest."""
    ids = torch.tensor([dialogue.ids])
    with torch.no_grad():
        x = hidden(config, tensors, ids[:, :-1], torch.arange(ids.shape[1] - 1)[None], torch.bfloat16)
        guess = F.linear(x[0, start:], tensors["output.weight"].bfloat16()).argmax(-1)
    said = torch.tensor(dialogue.kinds[start + 1 :]) > 0
    return bool((guess == ids[0, start + 1 :])[said].all())


def recall(vocab: Vocab, config: Config, tensors: Tensors, distance: int, count: int) -> float:
    rng, good = Random(SEED + distance), 0
    for _ in range(count):
        dialogue, people = probe(vocab, rng, distance)
        start = len(dialogue.ids)
        dialogue.ask(rng.choice(people))
        good += right(config, tensors, dialogue, start)
    return good / count


def sums(vocab: Vocab, config: Config, tensors: Tensors, unseen: bool, count: int) -> float:
    rng, good = Random(SEED), 0
    for _ in range(count):
        dialogue = Dialogue(vocab, rng, sums=lambda x, y: held_out(x, y) == unseen)
        dialogue.add_up()
        good += right(config, tensors, dialogue, 1)
    return good / count


def about(vocab: Vocab, config: Config, tensors: Tensors) -> float:
    good = total = 0
    for questions, answer in ABOUT:
        for question in questions:
            dialogue = Dialogue(vocab, Random(SEED))
            dialogue.say(question, answer)
            good += right(config, tensors, dialogue, 1)
            total += 1
    return good / total


def evaluate(vocab: Vocab, config: Config, tensors: Tensors, count: int = 32) -> dict[str, float]:
    found = {f"recall {d}": recall(vocab, config, tensors, d, count) for d in (64, 256, 512, 1024, 1500)}
    found["sums"] = sums(vocab, config, tensors, False, 2 * count)
    found["unseen sums"] = sums(vocab, config, tensors, True, 2 * count)
    found["about"] = about(vocab, config, tensors)
    return {name: round(share, 3) for name, share in found.items()}
