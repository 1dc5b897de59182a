"""Compare the log-likelihoods that lm-eval gets from `pyvelo serve` with the engine's in this process.

    pip install "lm_eval[api]"
    python scripts/check/lm_eval_loglikelihood.py
    python scripts/check/lm_eval_loglikelihood.py --pairs 500

lm-eval's backend local-completions asks a server of the demo model, with the server's tokenizer. It scores
right and wrong sums after their questions, and paragraphs of this project's pages. `LLM` scores the same
tokens with `prompt_logprobs`. Both engines are deterministic, so the values must be equal, up to the rounding
of their sums. The exit status is 0 if they are.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo import LLM, SamplingParams
from pyvelo.demo import DEMO_MODEL
from scripts._common import ROOT, ScriptError, run_main
from scripts._served import served

CONTEXT = 512
SCORE = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
Score = tuple[float, bool]
"""Log-likelihood of a continuation, and whether each of its tokens is the most likely one."""


def pairs(count: int) -> list[tuple[str, str]]:
    """Return questions, each with the text that is scored after it; some of it is wrong."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        a, b, error = draw.randrange(100), draw.randrange(100), draw.choice((0, 0, 1, 10))
        found.append((f"What is {a} + {b}?", f" {a} + {b} = {a + b + error}."))
    return found


def paragraphs() -> list[str]:
    """Return paragraphs of the pages."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*.md")))
    return [each for each in text.split("\n\n") if 80 < len(each) < CONTEXT]


def score(llm: LLM, context: Sequence[int], continuation: Sequence[int]) -> Score:
    """Return what the engine in this process says."""
    (output,) = llm.generate([[*context, *continuation]], SCORE)
    scored = (output.prompt_logprobs or ())[len(context) :]
    found = [each for each in scored if each is not None]
    return sum(each.logprob for each in found), all(each.token_id == each.top[0][0] for each in found)


def same(theirs: Score, ours: Score) -> bool:
    """Compare two scores."""
    return math.isclose(theirs[0], ours[0], rel_tol=1e-9) and theirs[1] == ours[1]


def compare(url: str, llm: LLM, n_pairs: int, streams: int) -> list[str]:
    """Score everything on both sides; return the differences."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bars
    try:
        from lm_eval.api.instance import Instance
        from lm_eval.models.openai_completions import LocalCompletionsAPI
    except ImportError as error:
        raise ScriptError(f"{error}: pip install 'lm_eval[api]'") from None
    remote: Any = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model="demo",
        tokenizer_backend="remote",
        num_concurrent=streams,
        max_length=CONTEXT,
    )
    wrong = []
    given, texts = pairs(n_pairs), paragraphs()
    asked = [Instance("loglikelihood", {}, each, number) for number, each in enumerate(given)]
    for (question, text), theirs in zip(given, remote.loglikelihood(asked, disable_tqdm=True), strict=True):
        head = llm.tokenize(question, add_special=False)
        ours = score(llm, head, llm.tokenize(question + text, add_special=False)[len(head) :])
        if not same(theirs, ours):
            wrong.append(f"{question}{text}: {theirs} from the server, {ours} from the engine")
    rolled = [Instance("loglikelihood_rolling", {}, (each,), number) for number, each in enumerate(texts)]
    for text, theirs in zip(texts, remote.loglikelihood_rolling(rolled, disable_tqdm=True), strict=True):
        ours = score(llm, [remote.prefix_token_id], llm.tokenize(text, add_special=False))
        if not same((theirs, ours[1]), ours):
            wrong.append(f"{text[:40]!r}: {theirs} from the server, {ours[0]} from the engine")
    print(f"{len(given)} continuations and {len(texts)} paragraphs: {len(wrong)} differ")
    return wrong


def main() -> int:
    """Compare and print the differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--streams", type=int, default=8, help="requests at once")
    given = parser.parse_args()
    if min(given.pairs, given.streams) < 1:
        raise ScriptError("--pairs and --streams must be at least 1")
    options = ("--ctx", str(CONTEXT), "--kv-cache-bytes", "64M", "--deterministic")
    with served(*options) as server, LLM(DEMO_MODEL, n_ctx=CONTEXT, deterministic=True) as llm:
        wrong = compare(server.url, llm, given.pairs, given.streams)
    for line in wrong[:20]:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
