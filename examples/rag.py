"""Answer a question from text files: embed their paragraphs, find the nearest ones, and ask with them.

    python examples/rag.py "How do sessions fork?" docs/*.md
    python examples/rag.py "How do sessions fork?" docs/*.md --model org/repo:Q4_K_M --embedder other.gguf

An embedder is a model for embeddings. Without one the vectors are of the model itself.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from pyvelo import LLM, SamplingParams
from pyvelo.demo import DEMO_MODEL

LONGEST = 400  # characters of a passage


def passages(files: list[Path]) -> list[str]:
    """Return the paragraphs of the files, the long ones cut."""
    paragraphs = (part for file in files for part in file.read_text(encoding="utf-8").split("\n\n"))
    return [" ".join(part.split())[:LONGEST] for part in paragraphs if part.strip()]


def nearest(embedder: LLM, question: str, texts: list[str], count: int) -> list[str]:
    """Return the passages whose vectors have the largest cosine with the question's, the best first."""
    vectors = embedder.embed([question, *texts], pooling="mean")  # of length 1
    best = np.argsort(vectors[1:] @ vectors[0])[::-1][:count]
    return [texts[index] for index in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default=DEMO_MODEL, help="GGUF file or name; default: the demo model")
    parser.add_argument("--embedder", help="GGUF file or name of a model for embeddings")
    parser.add_argument("--count", type=int, default=3, help="passages to show the model")
    given = parser.parse_args()
    with ExitStack() as opened:
        llm = opened.enter_context(LLM(given.model))
        embedder = opened.enter_context(LLM(given.embedder)) if given.embedder else llm
        found = nearest(embedder, given.question, passages(given.files), given.count)
        for number, text in enumerate(found, 1):
            print(f"[{number}] {text}")
        told = "\n\n".join(found)
        message = f"Answer from these passages alone.\n\n{told}\n\nQuestion: {given.question}"
        for piece in llm.chat_stream([{"role": "user", "content": message}], SamplingParams(max_tokens=200)):
            print(piece.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
