"""Ask `pyvelo serve` with clients that others wrote, each installed from the package index.

    python scripts/check/clients.py
    python scripts/check/clients.py langchain-openai --keep ~/.cache/clients

The server runs the demo model in this environment; the clients are installed in another one. Each client asks
for a sum as a whole and as a stream, and the answers must be the same. Prints a row for each client; the exit
status is 0 if all are right.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ScriptError, run_main
from scripts._served import served

QUESTION = "What is 12 + 30?"
COMMON = f"""
import os
url, question = os.environ["SERVER"], {QUESTION!r}
def same(whole, streamed):
    assert whole and whole == "".join(streamed), (whole, streamed)
    print(whole)
"""


@dataclass(frozen=True)
class Client:
    """A client: the packages that it needs, and a program that asks."""

    packages: tuple[str, ...]
    program: str


CLIENTS = {
    "openai": Client(
        ("openai",),
        """
from openai import OpenAI
client = OpenAI(base_url=url + "/v1", api_key="none")
messages = [{"role": "user", "content": question}]
def ask(**more):
    return client.chat.completions.create(model="demo", messages=messages, temperature=0, **more)
same(ask().choices[0].message.content,
     [event.choices[0].delta.content or "" for event in ask(stream=True) if event.choices])
assert [model.id for model in client.models.list()] == ["demo"]
""",
    ),
    "langchain-openai": Client(
        ("langchain-openai",),
        """
from langchain_openai import ChatOpenAI
llm = ChatOpenAI(base_url=url + "/v1", api_key="none", model="demo", temperature=0)
same(llm.invoke(question).content, [piece.content for piece in llm.stream(question)])
assert llm.invoke(question).usage_metadata["output_tokens"] > 0
""",
    ),
    "llama-index": Client(
        ("llama-index-llms-openai-like",),
        """
from llama_index.llms.openai_like import OpenAILike
llm = OpenAILike(api_base=url + "/v1", api_key="none", model="demo", is_chat_model=True, temperature=0)
same(llm.complete(question).text, [piece.delta for piece in llm.stream_complete(question)])
""",
    ),
    "litellm": Client(
        ("litellm",),
        """
import litellm
def ask(**more):
    messages = [{"role": "user", "content": question}]
    return litellm.completion(
        model="openai/demo", api_base=url + "/v1", api_key="none", messages=messages, temperature=0, **more)
same(ask().choices[0].message.content,
     [event.choices[0].delta.content or "" for event in ask(stream=True) if event.choices])
""",
    ),
    "anthropic": Client(
        ("anthropic",),
        """
from anthropic import Anthropic
client = Anthropic(base_url=url, api_key="none")
given = dict(model="demo", max_tokens=64, messages=[{"role": "user", "content": question}])
given["extra_body"] = {"temperature": 0}
with client.messages.stream(**given) as stream:
    streamed = list(stream.text_stream)
same(client.messages.create(**given).content[0].text, streamed)
""",
    ),
    "ollama": Client(
        ("ollama",),
        """
from ollama import Client
client = Client(host=url)
given = dict(model="demo", messages=[{"role": "user", "content": question}], options={"temperature": 0})
streamed = [piece.message.content for piece in client.chat(**given, stream=True)]
same(client.chat(**given).message.content, streamed)
""",
    ),
}


def environment(folder: Path, packages: list[str]) -> Path:
    """Make a virtual environment with packages, or complete an earlier one; return its Python."""
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    done = subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=False)
    if done.returncode != 0:
        raise ScriptError("the clients cannot be installed: see above")
    return python


def ask(python: Path, url: str, client: Client) -> str:
    """Run a client's program; return what went wrong, or ""."""
    command = [str(python), "-c", COMMON + client.program]
    settings = {"SERVER": url, "PATH": "/usr/bin:/bin", "HOME": str(python.parent)}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason"])[-1]


def main() -> int:
    """Install the clients, ask, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clients", nargs="*", help=f"of {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--keep", type=Path, help="folder of the virtual environment (default: a new one)")
    given = parser.parse_args()
    names = given.clients or list(CLIENTS)
    if unknown := set(names) - set(CLIENTS):
        raise ScriptError(f"{', '.join(sorted(unknown))}: give some of {', '.join(CLIENTS)}")
    failed = 0
    with tempfile.TemporaryDirectory() as folder, served() as server:
        packages = [package for name in names for package in CLIENTS[name].packages]
        python = environment(given.keep or Path(folder), packages)
        for name in names:
            wrong = ask(python, server.url, CLIENTS[name])
            failed += bool(wrong)
            print(f"{name:20} {wrong or 'ok'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
