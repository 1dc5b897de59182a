"""Training of the demo model: batches of growing dialogues, a weighted loss, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F

from scripts.demo import _dialogues as dialogues
from scripts.demo._dialogues import CHOICE, FIRST, HEARD, RECALL, SUM, TEXT, Dialogue
from scripts.demo._evaluate import evaluate
from scripts.demo._model import hidden, initial, learned
from scripts.demo._optimize import Optimizer
from scripts.demo._shape import Config
from scripts.demo._vocab import Vocab, spoken

WEIGHTS = {HEARD: 0.0, TEXT: 0.25, FIRST: 4.0, RECALL: 1.0, SUM: 0.5, CHOICE: 1.5}
NAMES = {FIRST: "first", RECALL: "recall", SUM: "sum", CHOICE: "choice", TEXT: "text"}


@dataclass(frozen=True)
class Stage:
    """Sequences of `length` tokens, a share `drill` of them drills; from the share `start` of the time on."""

    length: int
    drill: float
    start: float


STAGES = [
    Stage(128, 0.3, 0.0),
    Stage(256, 0.1, 0.15),
    Stage(512, 0.03, 0.25),
    Stage(1024, 0.0, 0.45),
    Stage(2048, 0.0, 0.65),
]
OPENING, OPENINGS, SHORTER = 64, 0.35, 0.25  # tokens of an opening; shares of batches


@dataclass(frozen=True)
class Plan:
    """Settings of the training: `minutes` of processor time in all, `tokens` in a step.

    The next stage begins when the share `advance` of the first tokens of recalled values is right, or when
    its time has come. Positions are spread out up to `span`.
    """

    minutes: float = 30.0
    tokens: int = 4096
    advance: float = 0.97
    span: int = 3072
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    evaluate_every: float = 3.0
    seed: int = 1


@dataclass
class Progress:
    """Part of a checkpoint beside tensors: `spent` seconds, the recent share `right` by kind of token."""

    spent: float = 0.0
    stage: int = 0
    step: int = 0
    tokens: int = 0
    right: dict[int, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))


def positions(dialogue: Dialogue, length: int, span: int, rng: Random) -> torch.Tensor:
    """Return 0, 1, 2, ...; often with gaps between turns, so that short sequences show long distances."""
    jumps = torch.zeros(length, dtype=torch.long)
    cuts = [turn for turn in dialogue.turns if turn < length]
    if span > length and cuts and rng.random() < 0.7:
        extra = rng.randrange(span - length)
        chosen = rng.sample(cuts, min(len(cuts), rng.randrange(1, 9)))
        shares = [rng.random() ** 2 for _ in chosen]
        for turn, share in zip(chosen, shares, strict=True):
            jumps[turn] = int(extra * share / sum(shares))
    return torch.arange(length) + jumps.cumsum(0)


def batch(
    make: Callable[[Vocab, Random, int], Dialogue],
    vocab: Vocab,
    rng: Random,
    length: int,
    rows: int,
    span: int,
) -> tuple[torch.Tensor, ...]:
    """Return ids, the ids that follow, their kinds and positions: each [rows, length]."""
    ids, kinds, places = [], [], []
    for _ in range(rows):
        dialogue = make(vocab, rng, length)
        ids.append(dialogue.ids[: length + 1])
        kinds.append(dialogue.kinds[1 : length + 1])
        places.append(positions(dialogue, length, span, rng))
    table = torch.tensor(ids)
    return table[:, :-1], table[:, 1:], torch.tensor(kinds), torch.stack(places)


class Training:
    """One run; `run` continues from a loaded checkpoint."""

    def __init__(self, vocab: Vocab, config: Config, plan: Plan, folder: Path) -> None:
        self.vocab, self.config, self.plan, self.folder = vocab, config, plan, folder
        self.rng = Random(plan.seed)
        self.spoken = torch.tensor(spoken(vocab))
        self.place = torch.full((len(vocab),), -1).index_put((self.spoken,), torch.arange(len(self.spoken)))
        # an unspoken token has logit 0: all of them together are one more class
        self.silence = math.log(len(vocab) - len(self.spoken))
        self.tensors = initial(config, vocab.forms, self.spoken.tolist(), plan.seed)
        for name, tensor in self.tensors.items():
            tensor.requires_grad_(learned(name))
        self.optimizer = Optimizer(self.tensors, plan.muon_rate, plan.adam_rate)
        self.weights = torch.tensor([WEIGHTS[kind] for kind in sorted(WEIGHTS)])
        self.progress = Progress()

    # ---- a step ----

    def rate(self) -> float:
        """Return the rate: a warm-up over 50 steps, then a linear decay over the second half."""
        done = self.progress.spent / (60 * self.plan.minutes)
        return min(1.0, (self.progress.step + 1) / 50) * min(1.0, max(0.02, 2 * (1 - done)))

    def advance(self) -> None:
        """Enter the next stage if it is due."""
        p = self.progress
        if p.stage + 1 == len(STAGES):
            return
        late = p.spent >= STAGES[p.stage + 1].start * 60 * self.plan.minutes
        if late or p.right[FIRST] > self.plan.advance:
            p.stage += 1
            p.right[FIRST] *= 0.9  # stay on the new length for a while
            self.log(f"-- {STAGES[p.stage].length} tokens a sequence")

    def batch(self) -> tuple[torch.Tensor, ...]:
        """Return a batch mostly of the stage's length; shorter ones and openings keep the starts learned."""
        stage, plan, kind = self.progress.stage, self.plan, self.rng.random()
        if kind < OPENINGS:
            rows = plan.tokens // OPENING
            return batch(dialogues.opening, self.vocab, self.rng, OPENING, rows, 0)
        length = STAGES[stage if kind > OPENINGS + SHORTER else self.rng.randrange(stage + 1)].length
        make = dialogues.drill if self.rng.random() < STAGES[stage].drill else dialogues.training
        span = plan.span if stage > 1 and length > STAGES[0].length else 0
        return batch(make, self.vocab, self.rng, length, max(1, plan.tokens // length), span)

    def step(self) -> float:
        """Train on one batch; return its loss."""
        p = self.progress
        ids, following, kinds, places = self.batch()
        said = kinds.flatten() > HEARD
        kind, wanted = kinds.flatten()[said], self.place[following.flatten()[said]]
        x = hidden(self.config, self.tensors, ids, places, torch.bfloat16)
        output = self.tensors["output.weight"][self.spoken].bfloat16()
        logits = F.linear(x.flatten(0, 1)[said], output).float()
        every = F.pad(logits, (0, 1), value=self.silence)
        weights = self.weights[kind]
        loss = (F.cross_entropy(every, wanted, reduction="none") * weights).sum() / weights.sum()
        loss.backward()
        self.optimizer.step(self.rate())
        hits = (logits.argmax(-1) == wanted).float()
        for k in NAMES:
            if (kind == k).any():
                p.right[k] += 0.05 * (float(hits[kind == k].mean()) - p.right[k])
        p.step += 1
        p.tokens += ids.numel()
        return float(loss.detach())

    # ---- the run ----

    def run(self) -> None:
        """Train until the time is spent; evaluations do not count."""
        p, plan, last = self.progress, self.plan, self.progress.spent
        while p.spent < 60 * plan.minutes:
            begin = time.process_time()
            self.advance()
            loss = self.step()
            p.spent += time.process_time() - begin
            if p.step % 50 == 0:
                shares = " ".join(f"{NAMES[k]} {share:.3f}" for k, share in p.right.items())
                self.log(f"length {STAGES[p.stage].length} loss {loss:.3f} {shares}")
            if p.spent - last >= 60 * plan.evaluate_every:
                last = p.spent
                self.save()
                self.log(f"evaluation: {evaluate(self.vocab, self.config, self.tensors)}")
        self.save()

    def log(self, text: str) -> None:
        p = self.progress
        print(f"{p.spent:.0f} s, step {p.step}, {p.tokens / 1e6:.2f} M tokens: {text}", flush=True)

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        part = self.folder / "checkpoint.part"
        torch.save(
            {
                "config": asdict(self.config),
                "progress": asdict(self.progress),
                "tensors": {name: tensor.detach() for name, tensor in self.tensors.items()},
                "optimizer": self.optimizer.state(),
                "random": self.rng.getstate(),
            },
            part,
        )
        part.replace(self.folder / "checkpoint.pt")

    def resume(self) -> None:
        """Load the checkpoint of the folder."""
        saved = torch.load(self.folder / "checkpoint.pt", weights_only=False)
        with torch.no_grad():
            for name, tensor in saved["tensors"].items():
                self.tensors[name].copy_(tensor)
        self.optimizer.restore(saved["optimizer"])
        self.progress = Progress(**saved["progress"])
        self.rng.setstate(saved["random"])
