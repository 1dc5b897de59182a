"""llama-server's own endpoints, against LLM."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pyvelo import LLM, SamplingParams

from .conftest import Serve
from .servers import Server

PROMPT = "What is a KV cache?"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, "ignore_eos": True}
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, top_k=40, top_p=0.95, min_p=0.05)


def test_completion(server: Server, oracle: LLM) -> None:
    (expected,) = oracle.generate([PROMPT], PARAMS)
    found = server.ask("/completion", {**GREEDY, "return_tokens": True, "cache_prompt": False, "id_slot": -1})
    assert found["content"] == expected.text
    assert found["tokens"] == list(expected.token_ids)
    assert (found["tokens_evaluated"], found["tokens_predicted"]) == (len(expected.prompt_token_ids), 12)
    assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "limit", "")
    assert PROMPT in found["prompt"]
    settings = found["generation_settings"]
    assert (settings["n_predict"], settings["top_k"], settings["seed"]) == (12, 40, -1)
    timings = found["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == len(expected.prompt_token_ids)
    assert timings["predicted_per_second"] == pytest.approx(11_000 / timings["predicted_ms"])
    assert "tokens" not in server.ask("/completion", {**GREEDY, "response_fields": ["content"]})


def test_events(server: Server, oracle: LLM) -> None:
    (expected,) = oracle.generate([PROMPT], PARAMS)
    answer = server.post("/completion", {**GREEDY, "stream": True, "n_probs": 2})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in answer.data.decode().splitlines() if line]
    assert "".join(event["content"] for event in events) == expected.text
    assert [token for event in events for token in event["tokens"]] == list(expected.token_ids)
    assert [event["stop"] for event in events] == [False] * 12 + [True]
    assert [len(event["completion_probabilities"]) for event in events[:-1]] == [1] * 12
    assert events[-1]["stop_type"] == "limit"
    assert events[-1]["timings"]["predicted_n"] == 12


@pytest.mark.parametrize("stop", [[], ["small d"]])
def test_events_have_every_token_of_the_whole_answer(server: Server, stop: list[str]) -> None:
    """Also the last one, which has no text: the end of the answer, or of a stop string."""
    body = {"prompt": "I am", "temperature": 0, "n_predict": 60, "n_probs": 1, "stop": stop}
    whole = server.ask("/completion", {**body, "return_tokens": True})
    assert whole["stop_type"] == ("word" if stop else "eos")
    answer = server.post("/completion", {**body, "stream": True})
    events = [json.loads(line[6:]) for line in answer.data.decode().splitlines() if line]
    assert [token for event in events for token in event["tokens"]] == whole["tokens"]
    found = [each for event in events for each in event.get("completion_probabilities", [])]
    assert found == whole["completion_probabilities"]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert events[-2]["tokens_predicted"] == events[-1]["tokens_predicted"] == whole["tokens_predicted"]


def test_several_prompts(server: Server, oracle: LLM) -> None:
    ids = oracle.tokenize(PROMPT)
    rest = oracle.tokenize(" Tell me more.", add_special=False)
    prompts = [PROMPT, ids, {"prompt_string": PROMPT}, [*ids, " Tell me more."]]
    found = server.ask("/completion", {**GREEDY, "prompt": prompts})
    assert [each["index"] for each in found] == [0, 1, 2, 3]
    assert found[0]["content"] == found[1]["content"] == found[2]["content"]
    (expected,) = oracle.generate([[*ids, *rest]], PARAMS)
    assert found[3]["content"] == expected.text
    assert isinstance(server.ask("/completion", {**GREEDY, "prompt": [PROMPT]}), list)
    assert server.ask("/completion", {**GREEDY, "prompt": ids})["content"] == found[0]["content"]


def test_ends(server: Server, oracle: LLM) -> None:
    (expected,) = oracle.generate([PROMPT], PARAMS)
    word = expected.text.split()[-1]
    stopped = server.ask("/completion", {**GREEDY, "stop": [word]})
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert stopped["content"] == expected.text[: expected.text.index(word)]
    forced = server.ask("/completion", {**GREEDY, "grammar": 'root ::= "yes"'})
    assert (forced["content"], forced["stop_type"]) == ("yes", "eos")
    nothing = server.ask("/completion", {**GREEDY, "n_predict": 0, "n_probs": 1})
    assert (nothing["content"], nothing["tokens_predicted"], nothing["stop_type"]) == ("", 0, "limit")
    assert nothing["generation_settings"]["n_predict"] == 0
    unbounded = server.ask("/completion", {**GREEDY, "n_predict": -1})
    assert unbounded["content"].startswith(expected.text)


def test_probabilities(server: Server, oracle: LLM) -> None:
    (expected,) = oracle.generate([PROMPT], replace(PARAMS, max_tokens=3, logprobs=2))
    found = server.ask("/completion", {**GREEDY, "n_predict": 3, "n_probs": 2})["completion_probabilities"]
    assert [each["id"] for each in found] == list(expected.token_ids)
    for each, right in zip(found, expected.outputs[0].logprobs or (), strict=True):
        assert each["logprob"] == pytest.approx(right.logprob, abs=1e-4)
        assert [best["id"] for best in each["top_logprobs"]] == [token for token, _ in right.top]
        assert bytes(each["bytes"]).decode("utf-8", "replace") == each["token"]


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("as_pairs", [False, True])
def test_bias(server: Server, oracle: LLM, as_text: bool, as_pairs: bool) -> None:
    (expected,) = oracle.generate([PROMPT], PARAMS)
    token = expected.token_ids[0]
    name: Any = oracle.detokenize([token]) if as_text else token
    if as_text and oracle.tokenize(name, add_special=False) != [token]:
        pytest.fail("the demo model's first token has another text")
    bias: Any = [[name, False]] if as_pairs else {str(name): -100}
    found = server.ask("/completion", {**GREEDY, "logit_bias": bias, "return_tokens": True})
    assert token not in found["tokens"]


def test_templates(server: Server, oracle: LLM) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    text = server.ask("/apply-template", {"messages": messages})["prompt"]
    tokens = server.ask("/chat/completions/input_tokens", {"messages": messages})["input_tokens"]
    expected = oracle.chat(messages, PARAMS)
    assert tokens == len(expected.prompt_token_ids)
    assert PROMPT in text
    answer = server.ask("/completion", {**GREEDY, "prompt": text})
    assert answer["content"] == expected.text


def test_properties(serve: Serve) -> None:
    found = serve(n_ctx=64, max_num_seqs=3).get("/props").json
    assert found["default_generation_settings"]["n_ctx"] == 64
    assert found["default_generation_settings"]["params"]["temperature"] == 0.8
    assert found["total_slots"] == 3
    assert found["model_path"].endswith(".gguf")
    assert found["chat_template"]


def test_tokens(server: Server, oracle: LLM) -> None:
    text = "page 媽 🤗"
    plain = server.ask("/tokenize", {"content": text})["tokens"]
    assert plain == oracle.tokenize(text, add_special=False)
    special = server.ask("/tokenize", {"content": text, "add_special": True})["tokens"]
    assert special == oracle.tokenize(text)
    pieces = server.ask("/tokenize", {"content": text, "with_pieces": True})["tokens"]
    assert [each["id"] for each in pieces] == plain
    raw = b"".join(
        each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in pieces
    )
    assert raw.decode().strip() == text
    assert server.ask("/detokenize", {"tokens": plain})["content"].strip() == text


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": [[1, None]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["b"]}}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": [10**12]}, None),
        ({"mirostat": 2}, "mirostat"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"n_probs": 21}, "logprobs"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "n"),
        ({"echo": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logit_bias": [[1, 10**400]]}, "logit_bias"),
        ({"logit_bias": [[True, 1]]}, "logit_bias"),
        ({"logit_bias": [["a" * 5000, 1]]}, "logit_bias"),
        ({"response_fields": ["/" * 257]}, None),
        ({"n_predict": "many"}, "max_tokens"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"logit_bias": "none at all"}, "logit_bias"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"logit_bias": [[None, 1]]}, "logit_bias"),
        ({"response_fields": ["content"] * 65}, "response_fields"),
        ({"grammar": "root ::= this is ("}, None),
    ],
)
def test_bad_requests(server: Server, wrong: dict[str, Any], name: str | None) -> None:
    answer = server.post("/completion", {**GREEDY, **wrong})
    assert answer.status == 400
    assert answer.error["param"] == name or name is None


def test_samplers_that_are_off(server: Server) -> None:
    off = {"mirostat": 0, "typical_p": 1, "dry_multiplier": 0, "xtc_probability": 0, "top_n_sigma": -1}
    assert server.ask("/completion", {**GREEDY, **off, "seed": -1})["tokens_predicted"] == 12


def test_digits_are_a_token_only_as_a_name(server: Server, oracle: LLM) -> None:
    name = "generation_settings/logit_bias"
    fields = {**GREEDY, "response_fields": [name]}
    by_id = server.ask("/completion", {**fields, "logit_bias": {"5": False}})[name]
    assert by_id == [{"token": 5, "bias": None}]
    by_text = server.ask("/completion", {**fields, "logit_bias": [["5", 1.5]]})[name]
    assert {each["token"] for each in by_text} == set(oracle.tokenize("5", add_special=False))


def test_settings_can_be_sent_back(server: Server) -> None:
    first = server.ask("/completion", {**GREEDY, "stop": [""], "temperature": -1, "lora": []})
    again = server.ask("/completion", {**first["generation_settings"], "prompt": PROMPT, "ignore_eos": True})
    assert again["content"] == first["content"]


def test_long_settings_are_sent_once(server: Server) -> None:
    long = {**GREEDY, "prompt": ["a"] * 8, "n_predict": 1, "stop": ["x" * 100_000]}
    assert len(server.post("/completion", long).data) < 200_000
    assert len(server.post("/completion", {**long, "stream": True}).data) < 200_000


def test_fields_of_the_last_event(server: Server) -> None:
    fields = ["stop", "timings/predicted_n", "timings/nothing", "content/nothing"]
    answer = server.post("/completion", {**GREEDY, "stream": True, "response_fields": fields})
    last = json.loads(answer.data.decode().splitlines()[-2][6:])
    assert last == {"stop": True, "timings/predicted_n": 12}


def test_any_model_name(serve: Serve) -> None:
    server = serve(model_names=("mine", "other", "*"))
    assert server.ask("/completion", {**GREEDY, "model": "gpt-4"})["model"] == "mine"
    assert [each["id"] for each in server.get("/v1/models").json["data"]] == ["mine", "other"]
    assert server.get("/v1/models/other").json["id"] == "other"
    assert server.get("/v1/models/gpt-4").json["id"] == "mine"
    assert serve(model_names=("mine", "other")).post("/completion", {**GREEDY, "model": "x"}).status == 404


def test_a_servers_template(serve: Serve) -> None:
    server = serve(chat_template="{% for m in messages %}<{{ m.content }}>{% endfor %}")
    messages = [{"role": "user", "content": "a"}]
    assert server.ask("/apply-template", {"messages": messages})["prompt"] == "<a>"
    assert server.get("/props").json["chat_template"].startswith("{% for m")
