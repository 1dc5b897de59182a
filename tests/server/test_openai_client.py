"""openai-python as a client: its types, streams, pages, retries and exceptions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from pyvelo import LLM, SamplingParams
from pyvelo.server.auth import read_keys

from .conftest import Serve
from .servers import Server

MESSAGES: list[Any] = [{"role": "user", "content": "What is 12 + 13?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=None)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_models_are_listed(client: OpenAI) -> None:
    [model] = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("demo", "model", "pyvelo")
    assert model.created > 0
    assert (model.model_extra or {})["max_model_len"] == 512
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_name_with_slashes_is_found(serve: Serve) -> None:
    server = serve(n_ctx=64, model_names=("org/model:Q4_0",))
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert client.models.retrieve("org/model:Q4_0").id == "org/model:Q4_0"
        assert client.completions.create(model="org/model:Q4_0", prompt="a", max_tokens=1).choices


def test_a_chat(client: OpenAI, oracle: LLM) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2
    )
    expected = oracle.chat(MESSAGES, GREEDY)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish_reason
    assert choice.message.refusal is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == expected.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    for token in choice.logprobs.content:
        assert token.bytes == list(token.token.encode())
        assert token.top_logprobs[0].logprob >= token.logprob
        assert len(token.top_logprobs) == 2


def test_a_stream_of_a_chat(client: OpenAI, oracle: LLM) -> None:
    with client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        temperature=0,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        *chunks, last = list(stream)
    texts = ["", ""]
    for chunk in chunks:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    expected = oracle.chat(MESSAGES, GREEDY)
    assert texts == [expected.text] * 2
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 2 * expected.usage.completion_tokens


def test_the_helper_of_streams(client: OpenAI, oracle: LLM) -> None:
    with client.chat.completions.stream(model="demo", messages=MESSAGES, temperature=0) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == oracle.chat(MESSAGES, GREEDY).text
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_parsed_answers(client: OpenAI) -> None:
    from pydantic import BaseModel

    class Sum(BaseModel):
        ok: bool

    answer = client.chat.completions.parse(
        model="demo",
        messages=MESSAGES,
        temperature=0,
        max_completion_tokens=200,
        response_format=Sum,
        extra_body={"logit_bias": None},
    )
    assert isinstance(answer.choices[0].message.parsed, Sum)


def test_a_completion(client: OpenAI, oracle: LLM) -> None:
    answer = client.completions.create(
        model="demo", prompt=["A number", "PyVelo cuts"], temperature=0, max_tokens=5, logprobs=1, echo=True
    )
    expected = oracle.generate(
        ["A number", "PyVelo cuts"], SamplingParams(temperature=0, max_tokens=5, echo=True)
    )
    assert [choice.text for choice in answer.choices] == [output.text for output in expected]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None


def test_a_stream_of_a_completion(client: OpenAI, oracle: LLM) -> None:
    stream = client.completions.create(model="demo", prompt="A number", temperature=0, stream=True)
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == oracle.generate("A number", SamplingParams(temperature=0))[0].text


def test_a_stream_can_be_left(server: Server, client: OpenAI) -> None:
    stream = client.completions.create(
        model="demo", prompt="a", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.until_idle()


def test_embeddings(client: OpenAI, oracle: LLM) -> None:
    texts = ["A number", "PyVelo cuts it into blocks"]
    expected = oracle.embed(texts, pooling="mean")
    for form in ("base64", "float"):
        answer = client.embeddings.create(
            model="demo",
            input=texts,
            encoding_format=form,
            extra_body={"pooling": "mean"},
        )
        found: Any = [each.embedding for each in answer.data]
        if form == "base64":
            import base64

            found = [np.frombuffer(base64.b64decode(each), "<f4") for each in found]
        assert np.array_equal(np.array(found, np.float32), expected)
        assert [each.index for each in answer.data] == [0, 1]
        assert answer.usage.prompt_tokens == sum(len(oracle.tokenize(text)) for text in texts)
    plain = client.embeddings.create(
        model="demo",
        input=oracle.tokenize(texts[1]),
        dimensions=expected.shape[1],
        extra_body={"pooling": "last"},
    )
    [vector] = [each.embedding for each in plain.data]
    assert np.allclose(vector, oracle.embed(texts[1], pooling="last")[0])
    assert math.isclose(float(np.linalg.norm(vector)), 1.0, rel_tol=1e-5)


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"tools": [{"type": "nothing"}]}, openai.BadRequestError, None),
        ({"extra_body": {"timeout": 0}}, openai.InternalServerError, None),
    ],
)
def test_errors_are_exceptions(
    client: OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], param: str | None
) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            client.chat.completions.create(
                **{"model": "demo", "messages": MESSAGES, "stream": stream, **fields}
            )
        if param is not None:
            assert caught.value.param == param
        assert caught.value.request_id


def test_a_wrong_key_is_an_exception(serve: Serve) -> None:
    server = serve(n_ctx=64, keys=read_keys(None, ["right"]))
    for key, good in (("wrong", False), ("right", True)):
        with OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            if good:
                assert len(client.models.list().data) == 1
            else:
                with pytest.raises(openai.AuthenticationError) as caught:
                    client.models.list()
                assert caught.value.code == "invalid_api_key"


def test_a_deadline_in_the_queue_is_not_retried(server: Server) -> None:
    asked: list[Any] = []
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2) as client:
        client._client.event_hooks = {"request": [asked.append]}
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="demo", prompt="a", extra_body={"timeout": 0})
    assert len(asked) == 1


def test_a_full_server_is_tried_again_after_the_time_that_it_names(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(n_ctx=64, max_num_seqs=1, max_queue=0)
    waited: list[float] = []

    with server.client() as first, OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        with server.paused_at(lambda stats: stats.running == 1) as wait:
            first.send("/v1/completions", {"prompt": "a", "max_tokens": 50, "ignore_eos": True})
            wait()

            def leave(seconds: float) -> None:
                waited.append(seconds)
                first.close()
                server.until_open(0)

            monkeypatch.setattr("openai._base_client.time.sleep", leave)
            pause = server.post("/v1/completions", {"prompt": "a"}).headers["retry-after"]
        # the engine may be done with the first request: then nothing is refused
        answer = client.completions.create(model="demo", prompt="a", max_tokens=2)
    assert waited in ([], [float(pause)])
    assert len(answer.choices) == 1


def test_many_clients_at_once(server: Server, oracle: LLM) -> None:
    async def main() -> list[str | None]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def ask(number: int) -> str | None:
                answer = await client.chat.completions.create(
                    model="demo",
                    messages=[{"role": "user", "content": f"What is {number} + 13?"}],
                    temperature=0,
                )
                return answer.choices[0].message.content

            return await asyncio.gather(*map(ask, range(12)))

    expected = [
        oracle.chat([{"role": "user", "content": f"What is {number} + 13?"}], GREEDY).text
        for number in range(12)
    ]
    assert asyncio.run(main()) == expected
    server.until_idle()
