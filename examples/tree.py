"""Search a tree of continuations: each round forks the best sessions and keeps the likeliest ones.

    python examples/tree.py "The KV cache" --rounds 3 --width 3 --branches 4

A fork shares all whole blocks of its session, of 32 tokens each. So a wide tree behind a long prompt takes
little more memory than its tips.
"""

from __future__ import annotations

import argparse

from pyvelo import LLM, SamplingParams, Session
from pyvelo.demo import DEMO_MODEL

Tip = tuple[float, str, Session]
"""Log-probability of a continuation, its text, and the session that holds it."""


def grow(tips: list[Tip], branches: int, tokens: int, seed: int) -> list[Tip]:
    """Return the branches of all tips that differ; the tips are closed."""
    grown: dict[str, Tip] = {}
    for score, text, session in tips:
        for branch in range(branches):
            fork = session.fork()
            sampling = SamplingParams(max_tokens=tokens, temperature=1.5, seed=seed + branch, logprobs=0)
            output = fork.generate(sampling)
            score_here = score + (output.outputs[0].cumulative_logprob or 0.0)
            if (longer := text + output.text) in grown:
                fork.close()
            else:
                grown[longer] = (score_here, longer, fork)
        session.close()
    return list(grown.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=3, help="tips that stay after each round")
    parser.add_argument("--branches", type=int, default=4, help="forks of each tip")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of a branch")
    parser.add_argument("--model", default=DEMO_MODEL, help="GGUF file or name; default: the demo model")
    given = parser.parse_args()
    with LLM(given.model) as llm:
        tips: list[Tip] = [(0.0, "", llm.session(given.prompt))]
        for number in range(given.rounds):
            grown = grow(tips, given.branches, given.tokens, seed=number * given.branches)
            alone = sum(-(-len(session) // llm.geometry.block_size) for _, _, session in grown)
            print(f"round {number + 1}: {len(grown)} tips in {llm.stats().blocks_used} blocks, not {alone}")
            grown.sort(key=lambda tip: -tip[0])
            tips = grown[: given.width]
            for _, _, session in grown[given.width :]:
                session.close()
        for score, text, session in tips:
            print(f"{score:7.2f}  {given.prompt}{text}")
            session.close()


if __name__ == "__main__":
    main()
