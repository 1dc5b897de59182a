"""Choice of a template, and tokens of a conversation: no user can write a control token."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvelo.chat.conversation import Chats, encode, is_one
from pyvelo.chat.marked import Marked, merge, theirs
from pyvelo.chat.template import ChatTemplate
from pyvelo.errors import RequestError, TemplateError
from pyvelo.native import Model
from tests.upstream_models import models_folder

USER = {"role": "user", "content": "Hi"}
SAYS = "{{ messages[0].content }}"


class FakeModel:
    """Letters are tokens; <s> and </s> are control tokens."""

    vocab = SimpleNamespace(bos=1, eos=2, add_bos=True)

    def __init__(self, **templates: str) -> None:
        self.meta = {f"tokenizer.{key}": value for key, value in templates.items()}

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        if token in (1, 2):
            return (b"<s>" if token == 1 else b"</s>") if special else b""
        return chr(token).encode()

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        assert not add_special
        if parse_special:
            text = text.replace("</s>", "\2").replace("<s>", "\1")
        return [ord(char) for char in text]


def chats(**templates: str) -> Chats:
    return Chats(cast(Any, FakeModel(**templates)))


def texts(made: Chats, messages: Any = (USER,), **options: Any) -> list[str]:
    return [prompt.text for prompt in made.prompts(list(messages), **options)]


# ---- which template ----


def test_the_models_own_template() -> None:
    made = chats(chat_template=SAYS + "!")
    assert made.template.name == "tokenizer.chat_template"
    assert texts(made) == ["Hi!"]


def test_a_named_fallback_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    made = chats()
    assert made.template.name == "chatml"
    assert texts(made)[0].startswith("<|im_start|>user\nHi<|im_end|>")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("pyvelo", "WARNING")
    assert "no chat template; chatml is used" in record.getMessage()
    texts(made)
    texts(chats(), chat_template="chatml")
    assert len(caplog.records) == 1


def test_roles_that_a_template_leaves_out_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    shows = (
        "{% for m in messages if m.role not in ('tool', 'critic') %}"
        "{{ m.content | trim | tojson }}{% endfor %}"
    )
    conversation = [
        {"role": "system", "content": ' Say "<yes>"\n'},
        {"role": "user", "content": "? !"},
        {"role": "assistant", "content": "<think>long</think>"},
        {"role": "critic", "content": ""},
        {"role": "user", "content": "Go on"},
    ]
    made = chats(chat_template=shows)
    texts(made, conversation)
    assert not caplog.records
    for _ in range(2):
        texts(
            made,
            [*conversation, {"role": "critic", "content": "never so"}, {"role": "tool", "content": "42"}],
        )
    critic, tool = (record.getMessage() for record in caplog.records)
    assert "leaves out messages of the role 'critic'" in critic
    assert "leaves out messages of the role 'tool'" in tool
    caplog.clear()
    add = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for choice in ("none", None, None):
        made.prompts(conversation, tools=[add], tool_choice=choice)
    assert [record.getMessage()[:35] for record in caplog.records] == ["the chat template leaves out tools:"]


def test_the_template_for_tools_is_taken_with_tools() -> None:
    made = chats(
        **{"chat_template": SAYS, "chat_template.tool_use": SAYS + "T", "chat_template.rag": SAYS + "R"}
    )
    assert texts(made) == ["Hi"]
    assert texts(made, tools=[]) == ["Hi"]
    assert texts(made, tools=[{"name": "f"}]) == ["HiT"]
    assert texts(made, chat_template="rag") == ["HiR"]
    assert texts(chats(chat_template=SAYS), tools=[{"name": "f"}]) == ["Hi"]


def test_another_template_by_text_or_name() -> None:
    made = chats(chat_template=SAYS)
    assert texts(made, chat_template="{{ messages | length }}") == ["1"]
    assert texts(made, chat_template="chatml")[0].startswith("<|im_start|>")
    assert texts(made, chat_template=ChatTemplate("{{ 5 }}")) == ["5"]
    with pytest.raises(RequestError, match="'chatlm' is neither Jinja nor one of chatml"):
        texts(made, chat_template="chatlm")
    with pytest.raises(RequestError, match="chat_template=5: give Jinja, the name of a template, or None"):
        texts(made, chat_template=5)
    with pytest.raises(TemplateError, match=r"^chat_template, line 1: "):
        texts(made, chat_template="{% for %}")


def test_one_conversation_or_several() -> None:
    made = chats(chat_template=SAYS)
    assert texts(made, [[USER], [{"role": "user", "content": "Ho"}]]) == ["Hi", "Ho"]
    assert is_one([USER])
    assert not is_one([])
    assert texts(made, []) == []
    assert not is_one([[USER]])
    with pytest.raises(RequestError, match="a stream answers one conversation"):
        made.one(cast(Any, [[USER]]))
    with pytest.raises(RequestError, match="messages are a list"):
        texts(made, [[USER], "x"])


def test_the_last_message_is_continued() -> None:
    made = chats(chat_template="{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
                 "{% if add_generation_prompt %}go{% endif %}")  # fmt: skip
    answer = {"role": "assistant", "content": "Once upon "}
    assert texts(made, [USER, answer]) == ["<Hi><Once upon>go"]
    assert texts(made, [USER, answer], continue_final_message=True) == ["<Hi><Once upon"]
    spaced = "{% for m in messages %}{{ m.content }} {% endfor %}go"
    assert texts(made, [answer], continue_final_message=True, chat_template=spaced) == ["Once upon "]
    go = {"role": "assistant", "content": "go"}  # it is the message's, not the template's
    assert texts(made, [go], continue_final_message=True, chat_template=spaced) == ["go"]
    parts = {"role": "assistant", "content": [{"type": "text", "text": "a"}]}
    assert texts(made, [parts], continue_final_message=True) == ["<a"]
    for messages, template in (([USER], None), ([answer], "{{ 1 }}"), ([{**answer, "content": " "}], None)):
        with pytest.raises(RequestError, match="continue_final_message"):
            texts(made, messages, continue_final_message=True, chat_template=template)


# ---- tokens ----


def test_the_first_token_is_not_doubled() -> None:
    for template, expected in ((SAYS, [1, 72, 105]), ("{{ bos_token }}" + SAYS, [1, 72, 105])):
        assert [list(prompt) for prompt in chats(chat_template=template).prompts([USER])] == [expected]
    bos_in_content = chats(chat_template=SAYS).prompts([{"role": "user", "content": "<s>"}])
    assert list(bos_in_content[0]) == [1, *b"<s>"]


def test_parts_of_control_tokens_do_not_join() -> None:
    made = chats(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}s>{{ eos_token }}")
    messages = [{"role": "user", "content": "<"}, {"role": "user", "content": "/s><"}]
    assert list(made.prompts(messages)[0]) == [1, *b"</s><s>", 2]
    written = chats(chat_template="{{ '<' + messages[0].role + '>' }}").prompts(
        [{"role": "s", "content": ""}]
    )
    assert list(written[0]) == [1]  # a template may put a role into a token


@pytest.fixture(scope="module", params=["qwen2", "llama-bpe", "llama-spm", "phi-3"])
def real(request: pytest.FixtureRequest) -> Iterator[Model]:
    with Model(models_folder() / f"ggml-vocab-{request.param}.gguf", vocab_only=True) as model:
        yield model


def controls(model: Model, tokens: list[int]) -> list[int]:
    return [token for token in tokens if not model.token_bytes(token)]


def test_a_user_cannot_write_control_tokens(real: Model) -> None:
    assert real.vocab.eos is not None
    end = real.token_bytes(real.vocab.eos, special=True).decode()

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.sampled_from([end, end[:2], end[2:], "a", " ", "\n", "é", "word"])).map("".join))
    def check(content: str) -> None:
        text = merge(["user: ", theirs(content), end, "assistant:"])
        tokens = encode(real, text)
        plain = encode(real, Marked(text.replace(end, "x"), bytes(len(text.replace(end, "x")))))
        assert controls(real, tokens) == [*controls(real, plain), real.vocab.eos]
        assert real.detokenize(tokens, special=True).decode().removesuffix("assistant:").strip().endswith(end)

    check()


@pytest.mark.parametrize("content", ["Hello world", "  two spaces\n", "日本語 🙂", ""])
def test_without_control_tokens_the_tokens_are_the_tokenizers(real: Model, content: str) -> None:
    assert real.vocab.eos is not None
    end = real.token_bytes(real.vocab.eos, special=True).decode()
    text = merge([end, "user\n", theirs(content), end, "\n"])
    expected = real.tokenize(str.__str__(text), add_special=False, parse_special=True)
    if real.vocab.add_bos and expected[0] != real.vocab.bos:
        expected = [cast(int, real.vocab.bos), *expected]
    assert encode(real, text) == expected
