"""Let a model use functions: it calls them until it has an answer.

    python examples/agent.py "What is 12 * 34?" --model org/repo:Q4_K_M

The model needs a chat template for tools, such as Qwen3's. The demo model has none: it answers without calls.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from pyvelo import LLM, SamplingParams
from pyvelo.demo import DEMO_MODEL

FUNCTIONS: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "power": lambda a, b: math.pow(a, b),
}
NUMBERS = {"a": {"type": "number"}, "b": {"type": "number"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} two numbers",
            "parameters": {"type": "object", "properties": NUMBERS, "required": ["a", "b"]},
        },
    }
    for name in FUNCTIONS
]


def run(name: str, arguments: str) -> str:
    """Return the result of a call, or what is wrong with it, for the model to read."""
    try:
        return str(FUNCTIONS[name](**json.loads(arguments)))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        return f"error: {error}"


def solve(llm: LLM, question: str, force: bool = False, turns: int = 5) -> list[dict[str, Any]]:
    """Return the conversation of the model with its functions."""
    talk: list[dict[str, Any]] = [{"role": "user", "content": question}]
    params = SamplingParams(temperature=0, max_tokens=512)
    for turn in range(turns):
        choice = "required" if force and turn == 0 else "auto"
        answer = llm.chat(talk, params, tools=TOOLS, tool_choice=choice).outputs[0]
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
        talk.append({"role": "assistant", "content": answer.content or answer.text, "tool_calls": calls})
        if not calls:
            break
        for call in answer.tool_calls:
            result = run(call.name, call.arguments)
            talk.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})
    return talk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--model", default=DEMO_MODEL, help="GGUF file or name; default: the demo model")
    parser.add_argument("--force", action="store_true", help="let it begin with a call")
    given = parser.parse_args()
    with LLM(given.model) as llm:
        for message in solve(llm, given.question, given.force):
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            told = [f"{call['name']}({call['arguments']})" for call in calls]
            print(f"{message['role']}: {' '.join(told) or message['content']}")


if __name__ == "__main__":
    main()
