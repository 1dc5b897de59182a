"""Answers that follow a schema, an expression, a grammar or a choice."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pyvelo import LLM

from .servers import Server
from .test_chat import joined

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Who are you?"}]
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "maximum": 99, "minimum": 0}, "ok": {"type": "boolean"}},
    "required": ["sum", "ok"],
    "additionalProperties": False,
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 120}


def is_sum(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"sum", "ok"} and 0 <= found["sum"] <= 99 and isinstance(found["ok"], bool)


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


NAMES = ["é 😀", 'a "quoted" \\ name', "x\ty"]
FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        is_sum,
    ),
    "strict json_schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
            }
        },
        is_sum,
    ),
    "guided_json": ({"guided_json": SCHEMA}, is_sum),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, is_sum),
    "guided_regex": ({"guided_regex": "[0-9]{3}x"}, re.compile("[0-9]{3}x").fullmatch),
    "guided_grammar": ({"guided_grammar": 'root ::= "yes" | "no"'}, ("yes", "no").__contains__),
    "guided_grammar in Lark": ({"guided_grammar": 'start: "yes" | "no"'}, ("yes", "no").__contains__),
    "guided_choice": ({"guided_choice": NAMES}, NAMES.__contains__),
    "guided_choice of quotes": ({"guided_choice": NAMES[1:2]}, NAMES[1].__eq__),
    "guided_choice of a tab": ({"guided_choice": NAMES[2:]}, NAMES[2].__eq__),
    "outputs of json": ({"structured_outputs": {"json": SCHEMA}}, is_sum),
    "outputs of regex": ({"structured_outputs": {"regex": "a{3}"}}, "aaa".__eq__),
    "outputs of choice": ({"structured_outputs": {"choice": ["xyz"]}}, "xyz".__eq__),
    "outputs of grammar": ({"structured_outputs": {"grammar": 'start: "q"'}}, "q".__eq__),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_follows_its_form(server: Server, oracle: LLM, form: str) -> None:
    fields, follows = FORMS[form]
    if follows is is_sum:  # else the small model writes white space only
        spaces = {str(token): -100 for text in (" ", "\t", "\n") for token in oracle.tokenize(text)}
        fields = {**fields, "logit_bias": spaces}
    body = {"messages": MESSAGES, **GREEDY, **fields}
    [choice] = server.ask(CHAT, body)["choices"]
    assert follows(choice["message"]["content"]), choice
    assert choice["finish_reason"] == "stop"
    [streamed] = joined(server.stream(CHAT, body))
    assert streamed["content"] == choice["message"]["content"]
    [choice] = server.ask(COMPLETIONS, {"prompt": "It is", **GREEDY, **fields})["choices"]
    assert follows(choice["text"]), choice


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
)
def test_an_object_begins_as_one(server: Server, fields: dict[str, Any]) -> None:
    """The small model may not come to an end."""
    [choice] = server.ask(CHAT, {"messages": MESSAGES, **GREEDY, "max_tokens": 8, **fields})["choices"]
    assert choice["message"]["content"].lstrip().startswith("{")


def test_an_empty_schema_is_any_json(server: Server) -> None:
    [choice] = server.ask(CHAT, {"messages": MESSAGES, **GREEDY, "max_tokens": 3, "guided_json": {}})[
        "choices"
    ]
    assert choice["message"]["content"].lstrip()[:1] in '{["0123456789-tfn'


def test_text_is_no_form(server: Server) -> None:
    body = {"messages": MESSAGES, **GREEDY}
    plain = server.ask(CHAT, body)["choices"]
    assert server.ask(CHAT, {**body, "response_format": {"type": "text"}})["choices"] == plain
    fields = {"response_format": {"type": "text"}, "guided_choice": ["a"]}
    assert server.ask(CHAT, {**body, **fields})["choices"][0]["message"]["content"] == "a"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "response_format and structured_outputs",
        ),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs", "only one"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema is missing"),
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"response_format": "json"}, "response_format", "object"),
        ({"guided_choice": []}, "guided_choice", "at least 1 item"),
        ({"structured_outputs": {"jsn": SCHEMA}}, "structured_outputs.jsn", "jsn is no parameter"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1 item"),
        ({"guided_json": "{"}, None, "json_schema"),
        ({"guided_json": {"type": "nothing"}}, None, "json_schema"),
        ({"guided_regex": "("}, None, "regex"),
        ({"guided_grammar": "start: ("}, None, "grammar"),
        ({"guided_regex": "a" * 200_000}, None, "characters"),
    ],
)
def test_wrong_forms_are_refused_by_name(
    server: Server, fields: dict[str, Any], param: str | None, says: str
) -> None:
    answer = server.post(CHAT, {"messages": MESSAGES, **fields})
    assert answer.status == 400, answer.data
    assert says in answer.error["message"]
    if param is not None:
        assert answer.error["param"] == param


BOMB = "((a{1000}){1000}){1000}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_regex": BOMB}, "no output can follow it"),
        (
            {"guided_json": {"type": "string", "pattern": f"^{BOMB}$"}},
            "no output can follow it",
        ),
        ({"guided_grammar": 'start: "a" start'}, "the grammar cannot be followed"),
    ],
)
def test_a_form_that_is_too_complex_is_refused(server: Server, fields: dict[str, Any], message: str) -> None:
    """No client should try it again, as it does after a 500."""
    body = {"messages": MESSAGES, **GREEDY, **fields}
    for answer in (server.post(CHAT, body), server.post(CHAT, {**body, "stream": True})):
        assert answer.status == 400, answer.data
        assert message in answer.error["message"]
