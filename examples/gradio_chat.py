"""Chat in a browser, with Gradio. Several people may chat at once.

    pip install gradio
    python examples/gradio_chat.py --model org/repo:Q4_K_M

A conversation's next answer computes only what is new: the KV cache has the rest.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from pyvelo import AsyncLLM, SamplingParams
from pyvelo.demo import DEMO_MODEL


def answers_of(
    llm: AsyncLLM, params: SamplingParams
) -> Callable[[str, list[dict[str, Any]]], AsyncGenerator[str, None]]:
    """Return the function that Gradio calls for a message: it yields the answer as it grows.

    Gradio closes the generator if the user presses "stop", and the request ends.
    """

    async def answer(message: str, history: list[dict[str, Any]]) -> AsyncGenerator[str, None]:
        talk = [{"role": turn["role"], "content": turn["content"]} for turn in history]
        talk.append({"role": "user", "content": message})
        text = ""
        async with aclosing(llm.chat_stream(talk, params)) as pieces:
            async for piece in pieces:
                text += "".join(delta.content for delta in piece.deltas)
                yield text

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL, help="GGUF file or name; default: the demo model")
    parser.add_argument("--max-tokens", type=int, default=512, help="length of an answer; default: 512")
    parser.add_argument("--port", type=int, default=7860, help="default: 7860")
    given = parser.parse_args()
    import gradio

    llm = AsyncLLM(given.model)
    answer = answers_of(llm, SamplingParams(max_tokens=given.max_tokens))
    gradio.ChatInterface(answer, title="PyVelo", api_name="chat").launch(server_port=given.port)


if __name__ == "__main__":
    main()
