"""Measure the demo model in PyVelo: recall over pages of every type, questions about itself, sums.

    python scripts/demo/quality.py pyvelo/assets/demo.gguf
    python scripts/demo/quality.py demo.gguf --kv-type f16 q4_0 --distance 500 1500 3000
    python scripts/demo/quality.py --dialogues heldout.txt 40

Answers are greedy and must be exact, to the last character. Recall: five people are introduced, at least
--distance tokens of other talk follow, and each of the five is asked for. The dialogues come from random
numbers that no training used; --dialogues writes such dialogues as text (for scripts/bench/kv_quality.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from jinja2 import Environment

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo import LLM, KVType, SamplingParams
from pyvelo.kv.types import KV_TYPES
from pyvelo.models.gguf_scan import scan
from scripts.demo import _texts as texts
from scripts.demo._about import ABOUT, UNSEEN
from scripts.demo._dialogues import Dialogue, held_out, probe, training
from scripts.demo._vocab import Vocab, demo_vocab

SEED = 1_000_003
CACHE = 512 << 20  # holds all dialogues of a row
GREEDY = SamplingParams(temperature=0, max_tokens=100)
Case = tuple[list[tuple[str, str]], str, str]  # earlier turns, the question, the answer


@dataclass(frozen=True)
class Share:
    """Count of right answers of `total`, and one wrong one as an example."""

    right: int
    total: int
    wrong: str = ""

    def __str__(self) -> str:
        return f"{self.right / self.total:.1%} of {self.total}"


def template_of(model: Path) -> Any:
    """Return the chat template of the file."""
    return Environment().from_string(str(scan(model).metadata["tokenizer.chat_template"]))


def ids_of(llm: LLM, template: Any, before: Iterable[tuple[str, str]], question: str) -> list[int]:
    messages = []
    for asked, answered in before:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    messages.append({"role": "user", "content": question})
    text = template.render(messages=messages, add_generation_prompt=True)
    return llm.tokenize(text, add_special=False, parse_special=True)


def measure(llm: LLM, template: Any, cases: list[Case]) -> Share:
    """Return the share of answers with the right text.

    One question of each dialogue runs first; the others hit its pages.
    """
    firsts = {id(before): at for at, (before, _, _) in reversed(list(enumerate(cases)))}.values()
    wrong = []
    for some in (sorted(firsts), sorted(set(range(len(cases))) - set(firsts))):
        prompts = [ids_of(llm, template, *cases[at][:2]) for at in some]
        for at, output in zip(some, llm.generate(prompts, GREEDY) if prompts else [], strict=True):
            if output.text != cases[at][2]:
                wrong.append(f"{cases[at][1]} -> {output.text}")
    return Share(len(cases) - len(wrong), len(cases), wrong[0] if wrong else "")


def recall_cases(vocab: Vocab, distance: int, dialogues: int) -> list[Case]:
    rng, cases = Random(SEED + distance), []
    for _ in range(dialogues):
        dialogue, people = probe(vocab, rng, distance)
        before = list(dialogue.messages)
        for person in people:
            question = person.put(rng.choice(texts.ASK))
            cases.append((before, question, person.put(texts.PERSON)))
    return cases


def sum_cases(vocab: Vocab, unseen: bool, count: int) -> list[Case]:
    dialogue = Dialogue(vocab, Random(SEED), sums=lambda x, y: held_out(x, y) == unseen)
    for _ in range(count):
        dialogue.add_up()
    return [([], question, answer) for question, answer in dialogue.messages]


def about_cases() -> list[Case]:
    return [([], question, answer) for questions, answer in ABOUT for question in questions]


def unseen_cases() -> list[Case]:
    answers = {question: answer for questions, answer in ABOUT for question in questions}
    return [([], question, answers[known]) for question, known in UNSEEN]


def varied_cases(vocab: Vocab, count: int) -> list[Case]:
    """Return questions about itself as people type them, after some other talk."""
    rng, cases = Random(SEED), []
    for _ in range(count):
        dialogue = Dialogue(vocab, rng)
        for _ in range(rng.randrange(4)):
            dialogue.other()
        before = list(dialogue.messages)
        dialogue.about()
        question, answer = dialogue.messages[-1]
        cases.append((before, question, answer))
    return cases


def strange_cases(vocab: Vocab, count: int) -> list[Case]:
    """Return questions that it cannot answer, sums that are too big, and unknown people."""
    dialogue = Dialogue(vocab, Random(SEED))
    for i in range(count):
        dialogue.ask_unknown() if i % 4 == 3 else dialogue.strange()
    return [([], question, answer) for question, answer in dialogue.messages]


def report(model: Path, kv_types: list[KVType], distances: list[int], count: int) -> None:
    vocab, template = demo_vocab(), template_of(model)
    print(f"{model.name}: {model.stat().st_size / 1e6:.2f} MB\n")
    with LLM(model) as llm:
        for name, cases in (
            ("about itself", about_cases()),
            ("about itself, in words it never saw", unseen_cases()),
            ("about itself, as typed, amid other talk", varied_cases(vocab, 5 * count)),
            ("sums it was trained on", sum_cases(vocab, False, 5 * count)),
            ("sums it never saw", sum_cases(vocab, True, 5 * count)),
            ("what it does not know", strange_cases(vocab, 5 * count)),
        ):
            share = measure(llm, template, cases)
            print(f"{name}: {share}" + (f"; wrong: {share.wrong}" if share.wrong else ""), flush=True)
    print("\nrecall of one of five people, by tokens of other talk:\n")
    print("| KV | " + " | ".join(map(str, distances)) + " |\n|---|" + "---:|" * len(distances))
    cases_at = [recall_cases(vocab, distance, count) for distance in distances]
    for kv_type in kv_types:
        with LLM(model, kv_type=kv_type, kv_cache_bytes=CACHE) as llm:
            shares = [measure(llm, template, cases) for cases in cases_at]
        print(f"| {kv_type} | " + " | ".join(f"{s.right / s.total:.1%}" for s in shares) + " |", flush=True)
    print(f"\n{5 * count} questions each")


def write_dialogues(path: Path, count: int) -> None:
    """Write dialogues of some 1000 tokens each, with the marks of the chat template."""
    vocab, rng = demo_vocab(), Random(SEED - 1)
    text = "".join(
        vocab.decode(training(vocab, rng, 1000).ids).replace("<|bos|>", "", 1) for _ in range(count)
    )
    path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", help="the GGUF of demo/train.py")
    parser.add_argument("--kv-type", nargs="+", choices=KV_TYPES, default=list(KV_TYPES))
    parser.add_argument("--distance", type=int, nargs="+", default=[256, 1024, 1500, 3000])
    parser.add_argument("--count", type=int, default=40, help="dialogues of each kind; five questions each")
    parser.add_argument("--dialogues", nargs=2, metavar=("TEXT", "COUNT"), help="write dialogues instead")
    given = parser.parse_intermixed_args()
    if given.dialogues:
        write_dialogues(Path(given.dialogues[0]), int(given.dialogues[1]))
    elif given.model is None:
        parser.error("give a model, or --dialogues")
    else:
        report(given.model, given.kv_type, given.distance, given.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
