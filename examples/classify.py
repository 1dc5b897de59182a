"""Sort many texts into classes: one batch, whose prompts share a beginning that is computed once.

python examples/classify.py "I want my money back" "Great, thanks!" --classes complaint praise question
"""

from __future__ import annotations

import argparse
import re

from pyvelo import LLM, SamplingParams
from pyvelo.demo import DEMO_MODEL


def classify(llm: LLM, texts: list[str], classes: list[str]) -> list[str]:
    """Return the class of each text; no other answer is possible."""
    rules = f"You sort messages into these classes: {', '.join(classes)}. Answer with one of them.\n\n"
    params = SamplingParams(temperature=0, max_tokens=200, regex="|".join(map(re.escape, classes)))
    llm.generate(rules, SamplingParams(max_tokens=1))  # so that all find the beginning in the cache
    outputs = llm.generate([f"{rules}Message: {text}\nClass: " for text in texts], params)
    return [output.text for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--classes", nargs="+", default=["complaint", "praise", "question"])
    parser.add_argument("--model", default=DEMO_MODEL, help="GGUF file or name; default: the demo model")
    given = parser.parse_args()
    with LLM(given.model) as llm:
        for text, found in zip(given.texts, classify(llm, given.texts, given.classes), strict=True):
            print(f"{found}: {text}")
        stats = llm.stats()
        print(f"{stats.hit_tokens} of {stats.queried_tokens} prompt tokens were in the cache")


if __name__ == "__main__":
    main()
