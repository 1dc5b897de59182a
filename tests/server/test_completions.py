"""/v1/completions gives what LLM.generate gives, as a whole and as a stream."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.outputs import RequestOutput, TokenLogprob
from pyvelo.server.completions import CompletionForm

from .servers import Server

PATH = "/v1/completions"
PROMPT = "What is 12 + 13? A number has"
OTHER = "PyVelo cuts it into blocks"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def joined(events: list[Any]) -> list[Any]:
    """Return the choices of a whole answer, made of the events of a stream."""
    choices: dict[int, Any] = {}
    for event in events:
        for piece in event["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "token_ids": [], "logprobs": None})
            assert choice.get("finish_reason") is None, "a piece follows the last one"
            choice["text"] += piece["text"]
            choice["token_ids"] += piece.get("token_ids", [])
            choice["finish_reason"] = piece["finish_reason"]
            choice["stop_reason"] = piece.get("stop_reason")
            for name, values in (piece["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"][name] = choice["logprobs"].get(name, []) + values
    return [choices[index] for index in sorted(choices)]


def check_logprobs(llm: LLM, given: Any, expected: list[TokenLogprob | None], tokens: list[int]) -> None:
    """Compare OpenAI's lists with the logprobs of tokens."""
    texts = [llm.detokenize([token], special=True) for token in tokens]
    assert given["tokens"] == texts
    assert given["token_logprobs"] == [each and each.logprob for each in expected]
    shown = [llm.detokenize([token]) for token in tokens]  # control tokens are no part of the text
    assert given["text_offset"] == [len("".join(shown[:n])) for n in range(len(shown))]
    for best, text, each in zip(given["top_logprobs"], texts, expected, strict=True):
        named = each and {llm.detokenize([token], special=True): value for token, value in each.top}
        assert best == (each and {text: each.logprob, **(named or {})})  # the token that came, too


def one(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    [output] = llm.generate([prompt], SamplingParams(**{**GREEDY, **params}))
    return output


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "long": {"max_tokens": 60},
    "end": {"ignore_eos": False, "max_tokens": 100},
    "samples": {"temperature": 1.2, "seed": 5, "n": 3},
    "seed": {"temperature": 1.2, "seed": 2**64 - 1, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5},
    "min_tokens": {"ignore_eos": False, "min_tokens": 20, "max_tokens": 24},
    "logprobs": {"logprobs": 3},
    "logprobs of the token alone": {"logprobs": 0},
    "echo": {"echo": True},
    "echo and logprobs": {"echo": True, "logprobs": 2, "max_tokens": 1},
    "echo, logprobs and samples": {"echo": True, "logprobs": 2, "n": 2, "temperature": 1.0, "seed": 3},
    "special tokens": {"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 60},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prompt", [PROMPT, [2, 327, 284, 262, 55, 1, 3]], ids=["text", "ids"])
def test_it_is_what_generate_gives(server: Server, oracle: LLM, case: str, prompt: Any) -> None:
    fields = {**GREEDY, **CASES[case]}
    body = {"prompt": prompt, **fields, "return_token_ids": True}
    answer = server.ask(PATH, body)
    params: dict[str, Any] = dict(fields)
    if "logprobs" in fields and fields.get("echo"):
        params["prompt_logprobs"] = fields["logprobs"]
    expected = one(oracle, prompt, **params)

    assert answer["object"] == "text_completion"
    assert answer["model"] == "demo"
    usage = answer["usage"]
    assert usage["prompt_tokens"] == expected.usage.prompt_tokens
    assert usage["completion_tokens"] == expected.usage.completion_tokens
    assert usage["total_tokens"] == expected.usage.total_tokens
    for index, (choice, sample) in enumerate(zip(answer["choices"], expected.outputs, strict=True)):
        assert choice["index"] == index
        assert choice["text"] == sample.text
        assert choice["token_ids"] == list(sample.token_ids)
        assert choice["prompt_token_ids"] == list(expected.prompt_token_ids)
        assert choice["finish_reason"] == sample.finish_reason
        if sample.logprobs is None:
            assert choice["logprobs"] is None
            continue
        scored, tokens = list(expected.prompt_logprobs or ()), list(expected.prompt_token_ids)
        if not fields.get("echo"):
            scored, tokens = [], []
        check_logprobs(oracle, choice["logprobs"], [*scored, *sample.logprobs], [*tokens, *sample.token_ids])
    names = ("text", "token_ids", "logprobs", "finish_reason", "stop_reason")
    assert joined(server.stream(PATH, body)) == [
        {name: choice[name] for name in names} for choice in answer["choices"]
    ]


def test_tokens_that_are_no_text_are_named_by_their_bytes(server: Server, oracle: LLM) -> None:
    tokens = [token for token in range(300) if oracle.detokenize([token], special=True) == "\ufffd"][:3]
    names = set()
    for token in tokens:
        bias = {"max_tokens": 1, "logprobs": 2, "logit_bias": {str(token): 100}}
        answer = server.ask(PATH, {"prompt": PROMPT, **GREEDY, **bias})
        [best] = answer["choices"][0]["logprobs"]["top_logprobs"]
        assert len(best) == 3  # the token that came, and the likeliest without the bias
        names.add(next(iter(best)))
    assert names == {r"bytes:\x80", r"bytes:\x81", r"bytes:\x82"}


def test_several_prompts_have_their_choices_in_order(server: Server, oracle: LLM) -> None:
    body = {"prompt": [PROMPT, OTHER], **GREEDY, "temperature": 1.0, "n": 2, "seed": 1, "logprobs": 1}
    answer = server.ask(PATH, body)
    params = SamplingParams(**GREEDY | {"temperature": 1.0, "n": 2, "seed": 1})
    expected = [sample for output in oracle.generate([PROMPT, OTHER], params) for sample in output.outputs]
    assert [choice["text"] for choice in answer["choices"]] == [sample.text for sample in expected]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 4 * GREEDY["max_tokens"]
    pieces = joined(server.stream(PATH, body))
    assert [piece["text"] for piece in pieces] == [sample.text for sample in expected]
    assert [piece["logprobs"] for piece in pieces] == [each["logprobs"] for each in answer["choices"]]


@pytest.mark.parametrize("prompts", [[[4, 2, 327], [4, 2]], [[4, 2, 327]]])
def test_prompts_of_token_ids(server: Server, oracle: LLM, prompts: list[list[int]]) -> None:
    answer = server.ask(PATH, {"prompt": prompts, **GREEDY})
    expected = [output.text for output in oracle.generate(prompts, SamplingParams(**GREEDY))]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_the_best_samples_come_first(server: Server, oracle: LLM) -> None:
    fields = {**GREEDY, "temperature": 1.5, "seed": 8, "n": 2, "best_of": 5}
    answer = server.ask(PATH, {"prompt": PROMPT, **fields})
    expected = one(oracle, PROMPT, **fields)
    assert [choice["text"] for choice in answer["choices"]] == [each.text for each in expected.outputs]
    assert answer["usage"]["completion_tokens"] == expected.usage.completion_tokens
    refused = server.post(PATH, {"prompt": PROMPT, **fields, "stream": True})
    assert (refused.status, refused.error["param"]) == (400, "best_of")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_and_a_stop_token_are_the_reason(server: Server, oracle: LLM, stream: bool) -> None:
    whole = one(oracle, OTHER, max_tokens=30)
    word, token = whole.text.split()[3], whole.token_ids[5]
    for fields, reason in (
        ({"stop": word}, word),
        ({"stop": ["~~", word]}, word),
        ({"stop_token_ids": [token]}, token),
    ):
        body = {"prompt": OTHER, **GREEDY, "max_tokens": 30, **fields}
        expected = one(oracle, OTHER, max_tokens=30, **fields)
        assert expected.finish_reason == "stop"
        [choice] = joined(server.stream(PATH, body)) if stream else server.ask(PATH, body)["choices"]
        assert choice["text"] == expected.text
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == reason


def test_samples_have_their_own_stop_reasons_in_a_stream(server: Server, oracle: LLM) -> None:
    fields = {**GREEDY, "temperature": 3.0, "seed": 4, "n": 4, "max_tokens": 20, "stop": ["e", "a", "i"]}
    expected = one(oracle, PROMPT, **fields)
    assert len({each.stop_reason for each in expected.outputs}) > 1
    choices = joined(server.stream(PATH, {"prompt": PROMPT, **fields}))
    assert [each["stop_reason"] for each in choices] == [each.stop_reason for each in expected.outputs]
    assert [each["text"] for each in choices] == [each.text for each in expected.outputs]


def test_a_bias_bans_and_forces_tokens(server: Server, oracle: LLM) -> None:
    first = one(oracle, PROMPT).token_ids[0]
    body = {"prompt": PROMPT, **GREEDY, "max_tokens": 1, "return_token_ids": True}
    banned = server.ask(PATH, {**body, "logit_bias": {str(first): -100}})
    assert banned["choices"][0]["token_ids"] != [first]
    forced = server.ask(PATH, {**body, "logit_bias": {"327": 100.0}})
    assert forced["choices"][0]["token_ids"] == [327]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, [2, 327, 284, 262, 55]], ids=["text", "ids"])
def test_no_tokens_score_a_prompt(server: Server, oracle: LLM, prompt: Any, stream: bool) -> None:
    """As harnesses of evaluation ask: echo, logprobs and max_tokens 0."""
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0, "return_token_ids": True}
    expected = one(oracle, prompt, max_tokens=1, prompt_logprobs=2, echo=True)
    ids = list(expected.prompt_token_ids)
    text = prompt if isinstance(prompt, str) else oracle.detokenize(ids)
    if stream:
        *pieces, last = server.stream(PATH, body | {"stream_options": {"include_usage": True}})
        [choice], usage = joined(pieces), last["usage"]
    else:
        answer = server.ask(PATH, body)
        [choice], usage = answer["choices"], answer["usage"]
    assert choice["text"] == text
    assert choice["token_ids"] == []
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    check_logprobs(oracle, choice["logprobs"], list(expected.prompt_logprobs or ()), ids)
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, len(ids))


def test_no_tokens_of_several_prompts_echo_each(server: Server) -> None:
    body = {"prompt": [PROMPT, OTHER], "echo": True, "max_tokens": 0, "n": 2}
    expected = [PROMPT, PROMPT, OTHER, OTHER]
    assert [choice["text"] for choice in server.ask(PATH, body)["choices"]] == expected
    assert [choice["text"] for choice in joined(server.stream(PATH, body))] == expected


def test_no_tokens_without_echo_are_nothing(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0}
    [choice] = server.ask(PATH, body)["choices"]
    assert (choice["text"], choice["logprobs"]) == ("", None)
    assert [each["text"] for each in joined(server.stream(PATH, body))] == [""]


def test_logprobs_of_prompts_are_written_beside_the_event_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, answer = [], CompletionForm.answer

    def watched(*given: Any) -> Any:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return answer(*given)

    monkeypatch.setattr(CompletionForm, "answer", watched)
    body = {"prompt": [PROMPT] * 3, "max_tokens": 1, "temperature": 0}
    choices = server.ask(PATH, {**body, "prompt_logprobs": 1, "logprobs": 1})["choices"]
    assert [each["index"] for each in choices] == [0, 1, 2]
    assert all(each["prompt_logprobs"] == choices[0]["prompt_logprobs"] for each in choices)
    server.ask(PATH, body)
    assert threads[0] == "pyvelo-prepare" != threads[1]


def test_logprobs_of_a_prompt_as_vllm_names_them(server: Server, oracle: LLM) -> None:
    [choice] = server.ask(PATH, {"prompt": PROMPT, **GREEDY, "prompt_logprobs": 2})["choices"]
    expected = one(oracle, PROMPT, prompt_logprobs=2).prompt_logprobs
    assert expected is not None
    assert choice["prompt_logprobs"][0] is None
    for given, each in zip(choice["prompt_logprobs"][1:], expected[1:], strict=True):
        assert each is not None
        ranks = {str(token): rank for rank, (token, _) in enumerate(each.top, 1)}
        assert given[str(each.token_id)]["logprob"] == each.logprob
        assert given[str(each.token_id)]["rank"] == ranks.get(str(each.token_id))
        assert set(given) == {*ranks, str(each.token_id)}
        for token, values in given.items():
            assert values["decoded_token"] == oracle.detokenize([int(token)], special=True)


def test_usage_is_the_last_event_of_a_stream_that_asks_for_it(server: Server) -> None:
    body = {"prompt": [PROMPT, OTHER], **GREEDY}
    assert all("usage" not in event for event in server.stream(PATH, body))
    *events, last = server.stream(PATH, {**body, "stream_options": {"include_usage": True}})
    assert all("usage" not in event for event in events)
    assert last["choices"] == []
    whole = server.ask(PATH, body)["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole[name]
    assert {event["id"] for event in events} == {last["id"]}


def test_a_prompt_that_was_seen_is_cached(server: Server) -> None:
    body = {"prompt": [7] * 100, **GREEDY}
    server.ask(PATH, body)
    usage = server.ask(PATH, body)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 96
    assert usage["pyvelo"]["pool_tokens"] == 96
    assert usage["pyvelo"]["peak_blocks"] >= 4
    assert usage["pyvelo"]["block_seconds"] > 0


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"max_tokens": 0, "echo": True, "logprobs": 0}])
def test_a_request_of_one_step_has_held_blocks(server: Server, fields: dict[str, Any]) -> None:
    """Scores of prompts are such requests, of any length."""
    body = {"prompt": [8] * 100, **fields}
    last = server.stream(PATH, {**body, "stream_options": {"include_usage": True}})[-1]
    for usage in (server.ask(PATH, body)["usage"], last["usage"]):
        assert usage["pyvelo"]["peak_blocks"] >= 4
        assert usage["pyvelo"]["block_seconds"] > 0


def test_characters_of_several_tokens_are_whole_in_each_event(server: Server, oracle: LLM) -> None:
    text = "é😀日本"
    events = server.stream(
        PATH, {"prompt": "a", **GREEDY, "max_tokens": 60, "return_token_ids": True, "guided_choice": [text]}
    )
    [choice] = joined(events)
    assert choice["text"] == text
    assert all("\ufffd" not in piece["text"] for event in events for piece in event["choices"])
    assert len(choice["token_ids"]) > len(text)  # so there are pieces without text


@pytest.mark.parametrize("as_ids", [False, True])
def test_places_in_a_text_are_in_whole_characters(server: Server, as_ids: bool) -> None:
    """Tokens of one character begin where it begins, whatever they are called."""
    text = "na\u00efve \U0001f642 b"
    body = {"prompt": "I", "guided_choice": [text], "max_tokens": 60, "temperature": 0, "echo": True}
    body |= {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": as_ids}
    [choice] = server.ask(PATH, body)["choices"]
    [streamed] = joined(server.stream(PATH, body))
    assert choice["text"] == streamed["text"] == f"I{text}"
    for given in (choice["logprobs"], streamed["logprobs"]):
        ids = server.ask("/tokenize", {"prompt": "I"})["tokens"] + choice["token_ids"]
        token_bytes = [server.serving.token_bytes(token) for token in ids[: len(given["tokens"])]]
        before = [b"".join(token_bytes[:n]) for n in range(len(token_bytes))]
        assert given["text_offset"] == [len(each.decode("utf-8", "ignore")) for each in before]
        assert len(given["tokens"]) > len(choice["text"])


@pytest.mark.parametrize("hides", [True, False])
def test_places_are_of_the_text_with_or_without_control_tokens(server: Server, hides: bool) -> None:
    body = {"prompt": [1, 37, 2, 38], "echo": True, "logprobs": 0, "max_tokens": 3, "ignore_eos": True}
    [choice] = server.ask(PATH, {**body, "skip_special_tokens": hides})["choices"]
    given = choice["logprobs"]
    assert len(choice["text"]) >= given["text_offset"][-1]
    for place, name, token in zip(given["text_offset"], given["tokens"], body["prompt"], strict=False):
        text = "" if hides and token in (1, 2) else name
        assert choice["text"][place : place + len(text)] == text
    assert (given["text_offset"][1] == 0) == hides


def test_special_tokens_can_be_left_out_of_the_prompt(server: Server, oracle: LLM) -> None:
    body = {"prompt": "a<|end|>", **GREEDY, "return_token_ids": True, "add_special_tokens": False}
    [choice] = server.ask(PATH, body)["choices"]
    assert choice["prompt_token_ids"] == oracle.tokenize("a<|end|>", add_special=False)


def test_events_are_ascii_free_of_line_breaks(server: Server) -> None:
    answer = server.post(PATH, {"prompt": "a\n\nb", **GREEDY, "echo": True, "stream": True})
    [first, *_] = answer.data.split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["text"].startswith("a\n\nb")


def test_samples_of_all_prompts_are_bounded(server: Server) -> None:
    answer = server.post("/v1/completions", {"prompt": ["a"] * 17, "n": 16})
    assert (answer.status, answer.json["error"]["param"]) == (400, "n")
    assert "272 samples" in answer.json["error"]["message"]


def test_tokens_of_a_stream(server: Server, oracle: LLM) -> None:
    body = {"prompt": [PROMPT, "a"], **GREEDY, "max_tokens": 3, "logprobs": 0, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    more = {"return_token_ids": True, "return_tokens_as_token_ids": True, "stream_options": options}
    events = [event for event in server.stream(PATH, {**body, **more}) if event["choices"]]
    for index, prompt in enumerate((PROMPT, "a")):
        mine = [event for event in events if event["choices"][0]["index"] == index]
        choices = [event["choices"][0] for event in mine]
        assert choices[0]["prompt_token_ids"] == oracle.tokenize(prompt)
        assert all("prompt_token_ids" not in choice for choice in choices[1:])
        assert [choice["logprobs"]["tokens"] for choice in choices] == [
            [f"token_id:{token}" for token in choice["token_ids"]] for choice in choices
        ]
        assert [event["usage"]["completion_tokens"] for event in mine] == list(range(1, len(mine) + 1))
        assert mine[0]["usage"]["prompt_tokens"] == len(oracle.tokenize(prompt))
