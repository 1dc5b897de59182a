"""Plugin of pytest that lets vLLM's own tests of its server start `pyvelo serve`; see vllm_suite.py.

PYVELO_SUITE in the environment is a JSON object with the models' files and the command. Modules of vLLM and
torch, which the tests import, become empty ones; `tests.utils` becomes `RemoteOpenAIServer` alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from scripts.check._suite import skip
from scripts.check._vllm_skips import DIFFERENT, OPTIONS

SETUP: dict[str, Any] = json.loads(os.environ["PYVELO_SUITE"])
FIXTURES = {"server", "client", "async_client", "remote_server", "base_url", "default_server_args"}


class RemoteOpenAIServer:
    """Server of a block of a test, with the options of vLLM that have a counterpart."""

    DUMMY_API_KEY = "none"

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **_: Any) -> None:
        file = SETUP["qwen" if "qwen" in model.lower() else "model"]
        # deterministic: random weights have near ties, which a prompt that is cached would turn
        options = ["--port", "0", "--quiet", "--deterministic", *_options(vllm_serve_args)]
        command = [*SETUP["command"], "serve", file, *options]
        command += ["--model-name", model, "--model-name", "*"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        found = re.search(r"http://[^/]+", line)
        if found is None:
            raise RuntimeError("pyvelo serve did not start")
        self.url_root = found[0]

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def url_for(self, *parts: str) -> str:
        """Return the address of a path."""
        return "/".join((self.url_root, *parts))

    def get_client(self, **named: Any) -> Any:
        """Return OpenAI's client of this server."""
        import openai

        return openai.OpenAI(**self._named(named))

    def get_async_client(self, **named: Any) -> Any:
        """Return OpenAI's asyncio client of this server."""
        import openai

        return openai.AsyncOpenAI(**self._named(named))

    def get_async_client_anthropic(self, **named: Any) -> Any:
        """Return Anthropic's asyncio client of this server."""
        import anthropic

        return anthropic.AsyncAnthropic(**{**self._named(named), "base_url": self.url_root})

    def _named(self, named: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": self.url_for("v1"), "api_key": "none", "max_retries": 0, "timeout": 60, **named}


def _options(given: Sequence[str]) -> list[str]:
    """Return our options for vLLM's; skip the case if one has no counterpart."""
    found, rest = [], list(given)
    while rest:
        name = rest.pop(0)
        if name in OPTIONS:
            pytest.skip(OPTIONS[name])
        values = []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        if name == "--max-model-len":
            found += ["--ctx", values[0]]
        elif name in ("--max-num-seqs", "--chat-template"):
            found += [name, *values]
    return found


class Tokenizer:
    """Part of a tokenizer of transformers that the tests use, over the model's own vocabulary."""

    def __init__(self, file: str) -> None:
        from pyvelo.native import Model

        self._model = Model(file, vocab_only=True)
        self.vocab_size = self._model.vocab.n_tokens

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return MagicMock(input_ids=self.encode(text, add_special_tokens))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text."""
        return self._model.tokenize(text, add_special=add_special_tokens, parse_special=True)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        raw = self._model.detokenize(list(tokens), special=not skip_special_tokens)
        return raw.decode("utf-8", "replace")


def _get_tokenizer(tokenizer_name: str, **_: Any) -> Tokenizer:
    return Tokenizer(SETUP["qwen" if "qwen" in tokenizer_name.lower() else "model"])


class _Empty(ModuleType):
    """Module that has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("Error"):
            return ValueError
        return MagicMock()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer of the empty modules."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in ("vllm", "torch") or name == "tests.utils":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        made: Any = _Empty(spec.name)
        if spec.name == "tests.utils":
            made.RemoteOpenAIServer = RemoteOpenAIServer
        if spec.name == "vllm.tokenizers":
            made.get_tokenizer = _get_tokenizer
        return made  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


sys.meta_path.insert(0, _Finder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what has no server, and the cases that cannot pass, each with its reason."""
    for item in items:
        skip(item, DIFFERENT)
        if not FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.skip(reason="tests a class of vLLM without a server"))
