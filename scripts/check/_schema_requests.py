"""Requests that schemathesis draws from the description of a server, mended in part, and their answers."""

from __future__ import annotations

import copy
import json
import math
import random
import re
import time
from collections import Counter, defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi import checks

from scripts._common import ScriptError

__all__ = ["Fuzz"]

ENDLESS = "/v1/blocks/stream"
MAX_TOKENS = 4
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict")
LENGTH_OF = {"/v1/responses": "max_output_tokens", "/api/chat": "num_predict", "/api/generate": "num_predict"}
"""Fields that bound an answer; max_tokens for other paths."""
GENERATES = re.compile(r".*(/completions|/messages|/responses|/generate|/api/chat)")
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SENSIBLE: dict[str, tuple[Any, ...]] = {
    "model": ("demo", "demo", "demo", None),
    "messages": (
        [{"role": "user", "content": "1 + 2"}],
        [{"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ],
        [{"role": "user", "content": "a", "tool_calls": "{"}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": 1, "arguments": "{"}}]}],
    ),
    "role": ("user", "user", "assistant", "system", "tool", "developer"),
    "content": ("1 + 2", [{"type": "text", "text": "a"}], [], "", None),
    "type": (
        "text",
        "json_object",
        "json_schema",
        "input_text",
        "message",
        "function",
        "tool_use",
        "tool_result",
    ),
    "prompt": ("What is 1 + 2?", ["a", "b"], [8, 9], [[8], [9, 10]]),
    "input": ("What is 1 + 2?", ["a"], [{"role": "user", "content": "a"}]),
    "tools": ([], None, [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
    "tool_choice": ("auto", "none", "required", {"type": "function", "function": {"name": "f"}}),
    "parameters": ({}, {"type": "object", "properties": {"a": {"type": "integer"}}}),
    "schema": ({"type": "integer"}, {"type": "array", "items": {"enum": [1, None]}}, True),
    "guided_regex": ("[ab]+", "(", None),
    "guided_grammar": ('root ::= "a"', "root ::=", None),
    "pooling": ("mean", "last"),
    "encoding_format": ("float", "base64"),
    "format": ("json", "", {"type": "integer"}),
    "lora": (None,),
    "suffix": (None, ""),
    "chat_template": (None, "{{ messages[0].content }}", "{% for x in %}", "{{ 1 // 0 }}"),
    "timeout": (None, 0.001, 30),
    "logit_bias": (None, {"5": 10}, {"6050": 1}),
    "temperature": (0, 0.7, 2),
    "top_k": (None, 1, -1, 40),
    "top_p": (None, 0.9, 1),
    "min_p": (None, 0.1),
    "stop_token_ids": (None, [1]),
    "n": (1, 2, 4),
    "tokens": ([8, 9], []),
    "token_ids": ([8, 9], None),
    "text": ("a", None),
}
"""Values of fields at any depth that a server takes, or nearly."""
EXTREME: tuple[Any, ...] = (
    -1,
    0,
    2**31,
    2**63,
    2**64,
    -(2**63) - 1,
    1e308,
    5e-324,
    "",
    "\0",
    "\ud800",
    "a" * 100_000,
    [],
    {},
    None,
)
"""Values of any field."""
NEEDED: dict[str, tuple[str, ...]] = {
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("messages",),
    "/v1/responses": ("input",),
    "/v1/embeddings": ("input", "pooling"),
    "/v1/messages": ("model", "messages"),
    "/v1/messages/count_tokens": ("model", "messages"),
    "/v1/sessions": ("prompt",),
    "/v1/sessions/{id}/append": ("text",),
    "/api/chat": ("model", "messages"),
    "/api/generate": ("model", "prompt"),
    "/api/show": ("model",),
    "/tokenize": ("prompt",),
    "/detokenize": ("tokens",),
}
"""Fields without which a path refuses a body; they are added to objects that lack them."""
ROUND = 20
"""Requests for each operation and kind, before the next one's turn."""
SECONDS = 60


@dataclass
class Fuzz:
    """Requests to one server, and their outcomes."""

    url: str
    draw: random.Random
    session: requests.Session = field(default_factory=requests.Session)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)
    ids: defaultdict[str, deque[str]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=16)))

    @property
    def n_sent(self) -> int:
        return self.statuses.total()

    def rounds(self, n_requests: int) -> None:
        """Send requests to each operation in turns."""
        schema: Any = schemathesis.openapi.from_url(f"{self.url}/openapi.json")
        operations = [found.ok() for found in schema.exclude(path=ENDLESS).get_all_operations()]
        modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
        self.ids["/v1/models"].append("demo")
        while self.n_sent < n_requests and not any("no answer" in each for each in self.wrong):
            before = self.n_sent
            for operation in operations:
                for mode in modes if operation.body or operation.path_parameters else modes[:1]:
                    self.turn(operation.as_strategy(generation_mode=mode))
            self.close_sessions()
            if self.n_sent == before:
                raise ScriptError("schemathesis drew no request")

    def turn(self, cases: Any) -> None:
        """Send some requests to one operation."""

        @seed(self.draw.randrange(1 << 32))
        @settings(
            max_examples=min(ROUND, 1 + self.n_sent),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases)
        def send(case: Any) -> None:
            self.send(case)

        with suppress(Unsatisfiable):  # no schema can be broken
            send()

    def send(self, case: Any) -> None:
        """Send one request and look at the answer."""
        resource = case.path.partition("/{id}")[0]
        if "{id}" in case.path and self.ids[resource] and self.draw.random() < 0.8:
            case.path_parameters["id"] = self.draw.choice(self.ids[resource])
        if self.draw.random() < 0.7:
            case.body = self.sensible(case.body)
            if isinstance(case.body, dict):
                for name in NEEDED.get(case.path, ()):
                    case.body.setdefault(name, self.draw.choice(SENSIBLE[name]))
        bound(case)
        try:
            answer = case.call(session=self.session, timeout=SECONDS)
        except requests.RequestException as error:
            self.note(case, f"no answer: {error}")
            return
        self.statuses[answer.status_code] += 1
        if answer.status_code >= 500 and answer.status_code not in (503, 504):
            self.note(case, f"status {answer.status_code}")
        try:
            case.validate_response(
                answer,
                checks=[
                    checks.status_code_conformance,
                    checks.content_type_conformance,
                    checks.response_schema_conformance,
                ],
            )
        except FailureGroup as group:
            for failure in group.exceptions:
                self.note(case, f"{answer.status_code}: {failure.title}")
        if (
            answer.status_code == 200
            and case.method == "POST"
            and resource in ("/v1/sessions", "/v1/responses")
        ):
            found = re.findall(r'"id":"((?:sess|resp)_\w+)"', answer.text)
            self.ids[resource].extend(found)

    def sensible(self, value: Any) -> Any:
        """Return a body without a part of its fields, and with sensible values in others."""
        if isinstance(value, list):
            return [self.sensible(each) for each in value]
        if not isinstance(value, dict):
            return value
        return {name: self.other(name, each) for name, each in value.items() if self.draw.random() < 0.6}

    def other(self, name: str, value: Any) -> Any:
        """Return a sensible value of a field, rarely an extreme one, or its own with changes inside."""
        lot = self.draw.random()
        if lot < 0.02:
            return self.draw.choice(EXTREME)
        if name in SENSIBLE and lot < 0.8:
            return copy.deepcopy(self.draw.choice(SENSIBLE[name]))
        return self.sensible(value)

    def note(self, case: Any, what: str) -> None:
        """Keep the first request of a kind of wrong answer."""
        self.wrong.setdefault(f"{case.operation.label}: {what}", case.as_curl_command())

    def close_sessions(self) -> None:
        """Close all sessions, so that their number stays below the limit."""
        url = f"{self.url}/v1/sessions"
        for each in self.session.get(url, timeout=SECONDS).json()["data"]:
            self.session.delete(f"{url}/{each['id']}", timeout=SECONDS)
        self.ids["/v1/sessions"].clear()

    def used_blocks(self) -> float:
        """Delete the responses that keep blocks for a next turn, and return the blocks that are still in use.

        The server may take a second to close sessions that have expired.
        """
        for name in self.owners():
            if name.startswith("resp_"):
                self.session.delete(f"{self.url}/v1/responses/{name}", timeout=SECONDS)
        used = math.inf
        end = time.monotonic() + 5
        while used and time.monotonic() < end:
            text = self.session.get(f"{self.url}/metrics", timeout=SECONDS).text
            found = re.search(r'^pyvelo:kv_blocks{.*state="used".*} (\S+)$', text, re.MULTILINE)
            if found is None:
                raise ScriptError("/metrics has no pyvelo:kv_blocks")
            used = float(found[1])
            time.sleep(0.2)
        return used

    def owners(self) -> list[str]:
        """Return the requests and sessions that have blocks, by the block map."""
        with self.session.get(f"{self.url}/v1/blocks/stream", stream=True, timeout=SECONDS) as answer:
            event = ""
            for line in map(bytes.decode, answer.iter_lines()):
                if line.startswith("event: "):
                    event = line.removeprefix("event: ")
                elif line.startswith("data: ") and event == "requests":
                    return [row["id"] for row in json.loads(line.removeprefix("data: "))["rows"]]
        raise ScriptError("/v1/blocks/stream has no requests")


def bound(case: Any) -> None:
    """Ask for a few tokens; leave a bound that is no number above it as it is."""
    if not isinstance(case.body, dict) or not GENERATES.fullmatch(case.path):
        return
    name = LENGTH_OF.get(case.path, "max_tokens")
    fields = case.body.setdefault("options", {}) if name == "num_predict" else case.body
    if not isinstance(fields, dict):
        return
    fields.setdefault(name, MAX_TOKENS)
    for each in LENGTHS:
        if each in fields and (fields[each] is None or isinstance(fields[each], int)):
            fields[each] = min(MAX_TOKENS, fields[each] or MAX_TOKENS)
