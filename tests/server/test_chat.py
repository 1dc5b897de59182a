"""/v1/chat/completions gives what LLM.chat gives, as a whole and as a stream."""

from __future__ import annotations

from typing import Any

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.outputs import RequestOutput, TokenLogprob

from .servers import Server

PATH = "/v1/chat/completions"
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 12 + 13?"},
]
GREEDY: dict[str, Any] = {"temperature": 0}


def joined(events: list[Any]) -> list[Any]:
    """Return the choices of a whole answer, made of the events of a stream."""
    choices: dict[int, Any] = {}
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        for piece in event["choices"]:
            delta, index = piece["delta"], piece["index"]
            if index not in choices:
                assert delta == {"role": "assistant", "content": ""}
                choices[index] = {"content": "", "token_ids": [], "logprobs": None, "finish_reason": None}
            else:
                assert set(delta) <= {"content"}
            choice = choices[index]
            assert choice["finish_reason"] is None, "a piece follows the last one"
            choice["content"] += delta.get("content", "")
            choice["token_ids"] += piece.get("token_ids", [])
            choice["finish_reason"] = piece["finish_reason"]
            choice["stop_reason"] = piece.get("stop_reason")
            if piece["logprobs"] is not None:
                before = choice["logprobs"] or []
                choice["logprobs"] = [*before, *piece["logprobs"]["content"]]
    return [choices[index] for index in sorted(choices)]


def named(llm: LLM, token: int, logprob: float) -> dict[str, Any]:
    raw = llm._engine.model.token_bytes(token, special=True)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def logprobs_of(llm: LLM, expected: tuple[TokenLogprob, ...] | None) -> list[Any] | None:
    """Return logprobs as OpenAI names them."""
    if expected is None:
        return None
    return [
        {
            **named(llm, each.token_id, each.logprob),
            "top_logprobs": [named(llm, token, value) for token, value in each.top],
        }
        for each in expected
    ]


def one(llm: LLM, messages: list[Any], options: dict[str, Any] | None = None, **params: Any) -> RequestOutput:
    given = SamplingParams(**{"max_tokens": None, "temperature": 0.7, "top_p": 0.95, **params})
    output: RequestOutput = llm.chat(messages, given, **(options or {}))
    return output


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "most tokens": ({"max_completion_tokens": 5, "max_tokens": 9}, {"max_tokens": 5}),
    "most tokens by the old name": ({"max_tokens": 6}, {"max_tokens": 6}),
    "logprobs": ({"logprobs": True}, {"logprobs": 0}),
    "top logprobs": ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
    "samples": ({"temperature": None, "seed": 3, "n": 3}, {"temperature": 0.7, "seed": 3, "n": 3}),
    "samples with logprobs": (
        {"temperature": 2.0, "seed": 3, "n": 2, "logprobs": True, "max_tokens": 6},
        {"temperature": 2.0, "seed": 3, "n": 2, "logprobs": 0, "max_tokens": 6},
    ),
    "stop": ({"stop": ["so", ","]}, {"stop": ["so", ","]}),
    "stop token": ({"stop_token_ids": [58]}, {"stop_token_ids": [58]}),
    "negative seed": (
        {"seed": -1, "temperature": 50.0, "max_tokens": 8},
        {"seed": 2**64 - 1, "temperature": 50.0, "max_tokens": 8},
    ),
    "bias": ({"logit_bias": {"55": -100.0}}, {"logit_bias": {55: -100.0}}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_chat_gives(server: Server, oracle: LLM, case: str) -> None:
    fields, params = CASES[case]
    body = {"messages": MESSAGES, **GREEDY, **fields, "return_token_ids": True}
    answer = server.ask(PATH, body)
    expected = one(oracle, MESSAGES, **{**GREEDY, **params})
    assert answer["object"] == "chat.completion"
    usage = answer["usage"]
    assert usage["prompt_tokens"] == expected.usage.prompt_tokens
    assert usage["completion_tokens"] == expected.usage.completion_tokens
    assert usage["total_tokens"] == expected.usage.total_tokens
    assert answer["prompt_token_ids"] == list(expected.prompt_token_ids)
    streamed = joined(server.stream(PATH, body))
    assert len(streamed) == len(answer["choices"])
    for index, (choice, sample) in enumerate(zip(answer["choices"], expected.outputs, strict=True)):
        assert choice["index"] == index
        message = choice["message"]
        assert (message["role"], message["content"]) == ("assistant", sample.text)
        assert message.get("refusal") is None
        assert choice["token_ids"] == list(sample.token_ids)
        assert (choice["finish_reason"], choice["stop_reason"]) == (sample.finish_reason, sample.stop_reason)
        logprobs = logprobs_of(oracle, sample.logprobs)
        assert choice["logprobs"] == (logprobs and {"content": logprobs})
        assert streamed[index] == {
            "content": sample.text,
            "token_ids": list(sample.token_ids),
            "logprobs": logprobs,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }


def test_the_models_own_defaults_count(server: Server, oracle: LLM) -> None:
    """Temperature and top_p of the file; the answer may fill the context."""
    default = oracle.get_default_sampling_params()
    assert default.temperature == 0.7  # else the cases prove less
    for seed in range(3):
        answer = server.ask(PATH, {"messages": MESSAGES, "seed": seed})
        expected = one(oracle, MESSAGES, seed=seed)
        assert answer["choices"][0]["message"]["content"] == expected.text


def test_a_developer_is_the_system(server: Server) -> None:
    as_system = server.ask(PATH, {"messages": MESSAGES, **GREEDY, "return_token_ids": True})
    developer = [{**MESSAGES[0], "role": "developer", "name": None}, MESSAGES[1]]
    answer = server.ask(PATH, {"messages": developer, **GREEDY, "return_token_ids": True})
    assert answer["choices"] == as_system["choices"]


def test_parts_of_a_content_are_its_text(server: Server, oracle: LLM) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "12 + 13?"}]
    messages = [MESSAGES[0], {"role": "user", "content": parts}]
    answer = server.ask(PATH, {"messages": messages, **GREEDY, "return_token_ids": True})
    expected = one(oracle, messages, **GREEDY)
    assert answer["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert answer["choices"][0]["message"]["content"] == expected.text
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    refused = server.post(PATH, {"messages": [{"role": "user", "content": image}]})
    assert refused.status == 400


def test_the_final_message_can_be_continued(server: Server, oracle: LLM) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "2 + 3 = 5,"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    answer = server.ask(PATH, {"messages": messages, **GREEDY, **options, "return_token_ids": True})
    expected = one(oracle, messages, options, **GREEDY)
    assert answer["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert answer["choices"][0]["message"]["content"] == expected.text
    refused = server.post(PATH, {"messages": MESSAGES, **options})
    assert refused.status == 400
    assert "continue_final_message" in refused.error["message"]


def test_templates_and_their_arguments(server: Server, oracle: LLM) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mood }}{{ reasoning_effort }}"
    arguments = {"mood": "!"}
    body = {
        "messages": MESSAGES,
        **GREEDY,
        "max_tokens": 4,
        "chat_template": template,
        "chat_template_kwargs": arguments,
        "reasoning_effort": "low",
        "return_token_ids": True,
    }
    ids = server.ask(PATH, body)["prompt_token_ids"]
    assert oracle.detokenize(ids) == "[Be short.][What is 12 + 13?]!low"
    refused = server.post(PATH, {**body, "chat_template": "{{ nothing.at.all() }}"})
    assert refused.status == 400


def test_logprobs_of_a_prompt(server: Server, oracle: LLM) -> None:
    answer = server.ask(PATH, {"messages": MESSAGES, **GREEDY, "prompt_logprobs": 1})
    expected = one(oracle, MESSAGES, **GREEDY, prompt_logprobs=1).prompt_logprobs
    assert expected is not None
    given = [
        each and each[str(scored.token_id)]["logprob"]
        for each, scored in zip(answer["prompt_logprobs"], expected, strict=True)
        if scored is not None
    ]
    assert given == [each.logprob for each in expected if each is not None]
    assert "prompt_logprobs" not in server.ask(PATH, {"messages": MESSAGES, **GREEDY})


def test_characters_of_several_tokens_are_whole_in_each_event(server: Server) -> None:
    body = {"messages": MESSAGES, **GREEDY, "return_token_ids": True, "guided_choice": ["é😀日本"]}
    [whole] = server.ask(PATH, body)["choices"]
    [choice] = joined(server.stream(PATH, body))
    assert choice["content"] == whole["message"]["content"] == "é😀日本"
    assert choice["token_ids"] == whole["token_ids"]


def test_usage_is_the_last_event_of_a_stream_that_asks_for_it(server: Server) -> None:
    body = {"messages": MESSAGES, **GREEDY, "n": 2}
    assert all("usage" not in event for event in server.stream(PATH, body))
    *events, last = server.stream(PATH, {**body, "stream_options": {"include_usage": True}})
    assert all("usage" not in event for event in events)
    assert last["choices"] == []
    whole = server.ask(PATH, body)["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole[name]


def test_an_event_has_what_clients_read(server: Server) -> None:
    events = server.stream(PATH, {"messages": MESSAGES, **GREEDY})
    for event in events:
        assert {"id", "object", "created", "model", "system_fingerprint", "choices"} <= set(event)
        assert (event["id"], event["model"]) == (events[0]["id"], "demo")
        for choice in event["choices"]:
            assert {"index", "delta", "finish_reason", "logprobs"} <= set(choice)


def test_fields_that_change_nothing_are_accepted(server: Server) -> None:
    plain = server.ask(PATH, {"messages": MESSAGES, **GREEDY})["choices"]
    ignored = {
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "2"},
        "parallel_tool_calls": True,
        "user": "me",
        "tools": None,
        "tool_choice": "none",
        "modalities": None,
    }
    assert server.ask(PATH, {"messages": MESSAGES, **GREEDY, **ignored})["choices"] == plain


def test_usage_in_each_event(server: Server) -> None:
    body = {"messages": MESSAGES, **GREEDY, "n": 2, "stream_options": {"include_usage": True}}
    events = server.stream(PATH, {**body, "stream": True})
    assert [event.get("usage") is None for event in events] == [True] * (len(events) - 1) + [False]
    body["stream_options"]["continuous_usage_stats"] = True
    events = server.stream(PATH, {**body, "stream": True})
    last, counts = events.pop()["usage"], {0: 0, 1: 0}
    for event in events:
        usage, [choice] = event["usage"], event["choices"]
        assert usage["prompt_tokens"] == last["prompt_tokens"]
        assert usage["completion_tokens"] - counts[choice["index"]] in (0, 1)
        counts[choice["index"]] = usage["completion_tokens"]
    assert sum(counts.values()) == last["completion_tokens"]


def test_tokens_of_a_stream(server: Server, oracle: LLM) -> None:
    body = {"messages": MESSAGES, **GREEDY, "logprobs": True, "stream": True, "return_token_ids": True}
    events = server.stream(PATH, {**body, "return_tokens_as_token_ids": True})
    expected = one(oracle, MESSAGES, **GREEDY)
    assert events[0]["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert all("prompt_token_ids" not in event for event in events[1:])
    ids = [token for event in events[1:] for token in event["choices"][0]["token_ids"]]
    named = [each["choices"][0]["logprobs"]["content"][0]["token"] for each in events[1:]]
    assert named == [f"token_id:{token}" for token in ids]
