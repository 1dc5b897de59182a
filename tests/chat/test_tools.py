"""Tool calls and reasoning: upstream's formats of the models that it has templates for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pyvelo.chat.answer_format import AnswerFormat, AnswerFormats, after
from pyvelo.chat.conversation import ChatPrompt, parsed
from pyvelo.chat.tool_parser import ParsedMessage, ToolParser
from pyvelo.chat.tools import Tools, history
from pyvelo.errors import ComputeError, ConfigError, RequestError, TemplateError, VeloError
from pyvelo.native.chat_format import ChatFormat
from pyvelo.outputs import Completion, Delta, RequestOutput, RequestTimes, Usage
from pyvelo.sampling import MAX_CHARACTERS, LazyGrammar, SamplingParams

from .answers import ANSWERS, NOTE_JSON, OSS, PARIS_JSON, QWEN, TOOLS, Answer, function, hermes
from .conversations import CONVERSATIONS
from .hostile import BROKEN, ENDLESS, HUGE
from .upstream_templates import NAMES, source_of, upstream_template

USER = [{"role": "user", "content": "Hi"}]
NO_TOOLS = {  # upstream finds no tool calls in these
    "HuggingFaceTB-SmolLM3-3B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
SLOW = {"strip", "strip from the end"}  # each ends after many seconds within one operation


class Letters:
    """Vocabulary of a token for each byte, and control tokens with these names."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        tokens: list[int] = []
        while text:
            name = next((name for name in self.names if parse_special and text.startswith(name)), "")
            tokens += [256 + self.names.index(name)] if name else text[0].encode()
            text = text[len(name) or 1 :]
        return tokens

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        if token < 256:
            return bytes((token,))
        return self.names[token - 256].encode() if special else b""


@cache
def format_of(name: str, arguments: str = "{}", choice: str | None = "auto") -> AnswerFormat:
    """Return the format of a template for TOOLS and a prompt of PyVelo's own template engine."""
    variables = json.loads(arguments)
    try:
        prompt = upstream_template(name).render(USER, tools=TOOLS, **variables)
    except TemplateError:  # two templates need what no caller gives
        prompt = ChatFormat(source_of(name)).plan({"messages": USER}).facts["prompt"]
    found = formats().find(source_of(name), prompt, USER, Tools.of(TOOLS, choice), variables)
    assert found is not None
    return found


@cache
def formats(*names: str) -> AnswerFormats:
    return AnswerFormats(Letters(*names))


def parser_of(answer: Answer) -> AnswerFormat:
    return format_of(answer.template, json.dumps(answer.arguments))


def parts(message: ParsedMessage) -> tuple[Any, ...]:
    calls = tuple((call.name, json.loads(call.arguments)) for call in message.tool_calls)
    return message.content, message.reasoning, calls


def joined(deltas: list[Delta]) -> tuple[Any, ...]:
    """Return content, reasoning and calls of deltas, as a client joins them."""
    calls: list[list[str]] = []
    for delta in deltas:
        if delta.index is not None and delta.name is not None:
            assert delta.index == len(calls)
            assert delta.id
            calls.append([delta.id, delta.name, ""])
        if delta.index is not None:
            calls[delta.index][2] += delta.arguments
    content, reasoning = ("".join(getattr(one, name) for one in deltas) for name in ("content", "reasoning"))
    return content, reasoning or None, [tuple(call) for call in calls]


def pushed(parser: ToolParser, pieces: Iterator[str]) -> tuple[ParsedMessage, tuple[Any, ...]]:
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    message = parser.finish()
    return message, joined([*deltas, *message.deltas])


def cut(text: str, places: list[int]) -> Iterator[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return (text[begin:end] for begin, end in pairwise(ends))


# ---- answers ----


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: f"{answer.template}: {answer.text[:30]!r}")
def test_the_parts_of_an_answer(answer: Answer) -> None:
    message = parser_of(answer).parse(answer.text)
    assert parts(message) == (answer.content, answer.reasoning, answer.calls)
    assert message.complete
    assert not answer.ids or tuple(call.id for call in message.tool_calls) == answer.ids
    assert all(call.id for call in message.tool_calls)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: f"{answer.template}: {answer.text[:30]!r}")
def test_every_stride_gives_the_same(answer: Answer) -> None:
    for stride in (1, 2, 3, 5, 8, 13, 1000):
        pieces = (answer.text[at : at + stride] for at in range(0, len(answer.text), stride))
        message, (content, reasoning, calls) = pushed(parser_of(answer).parser(), pieces)
        assert parts(message) == (answer.content, answer.reasoning, answer.calls)
        assert (content, reasoning) == (message.content, message.reasoning)
        assert calls == [(call.id, call.name, call.arguments) for call in message.tool_calls]


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 500), max_size=12), st.integers(0, 500), st.data())
def test_any_split_of_any_text_gives_the_same(
    answer: Answer, places: list[int], at: int, data: st.DataObject
) -> None:
    text = answer.text
    damage = data.draw(st.sampled_from(["", "}", '"', "<", "</tool_call>", "\\", "\0", "[", "x", "é\n"]))
    at %= len(text) + 1
    text = text[:at] + damage + text[at + data.draw(st.integers(0, 3)) :]
    text = text[: data.draw(st.integers(0, len(text)))]
    one, all_at_once = pushed(parser_of(answer).parser(), iter([text]))
    other, in_pieces = pushed(parser_of(answer).parser(), cut(text, places))

    def known(found: tuple[Any, ...]) -> tuple[Any, ...]:
        return *found[:2], [call[1:] for call in found[2]]

    assert known(all_at_once) == known(in_pieces)
    assert known(in_pieces) == (
        other.content,
        other.reasoning,
        [(call.name, call.arguments) for call in other.tool_calls],
    )
    assert one.complete == other.complete


def test_arguments_stream() -> None:
    parser, found = format_of(QWEN).parser(), []
    text = hermes("weather", PARIS_JSON)
    for number, letter in enumerate(text):
        found += [(number, delta) for delta in parser.push(letter)]
    names = [number for number, delta in found if delta.name == "weather"]
    arguments = [number for number, delta in found if delta.arguments]
    assert names[0] < text.index("Paris")
    assert len(arguments) >= 10


def test_content_streams_at_once() -> None:
    parser = format_of(QWEN).parser()
    parser.push("Hello there, ")
    assert joined(parser.push("my "))[0] + joined(parser.push("friend"))[0] == " my friend"
    assert parser.push(" <tool_") in ([], [Delta(content=" ")])
    assert parser.finish().content == "Hello there, my friend "  # upstream drops the beginning of a mark


def test_a_cut_answer_keeps_its_beginning() -> None:
    text = hermes("save", NOTE_JSON)
    for end in range(len(text)):
        message = format_of(QWEN).parse(text[:end])
        assert len(message.tool_calls) <= 1
        if message.tool_calls:
            assert (
                NOTE_JSON.startswith(message.tool_calls[0].arguments)
                or message.tool_calls[0].arguments == "{}"
            )


def test_text_in_another_format_is_content() -> None:
    for text in ("<tool_call>\nno JSON</tool_call>", "<tool_call>", hermes("unknown", "{}")):
        message = format_of(QWEN).parse(text)
        assert (message.content, message.tool_calls, message.complete) == (text, (), False)


@pytest.mark.parametrize(
    "text", ["[" * 5000, "<tool_call>\n" + '{"name": "save", "arguments": ' + "[{" * 3000]
)
def test_deep_answers(text: str) -> None:
    format_of(QWEN).parse(text)
    format_of("Qwen3-Coder").parse(text)
    format_of("meta-llama-Llama-3.2-3B-Instruct").parse(text)


@given(st.text(max_size=80))
@example("\0")
@example("\ud800")
def test_any_text_has_parts(text: str) -> None:
    for name in (QWEN, OSS):
        message = format_of(name).parse(text)
        assert isinstance(message.content, str)


# ---- formats ----


@pytest.mark.parametrize("name", NAMES)
def test_every_template_has_a_format(name: str) -> None:
    found = format_of(name)
    assert found.grammar is None or isinstance(found.grammar, LazyGrammar)  # a call need not come
    assert format_of(name, choice="none").parse("Hello").content == "Hello" or name not in (QWEN,)
    if name in NO_TOOLS:
        with pytest.raises(RequestError, match="tool_choice: this model"):
            format_of(name, choice="required")
    else:
        assert "root ::=" in (format_of(name, choice="required").grammar or "")


class Bytes:
    """Vocabulary of bytes, for llguidance."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes((byte,)) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def matcher_of(grammar: str) -> Any:
    llguidance = pytest.importorskip("llguidance")
    from pyvelo.grammar.lark import to_lark

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), n_vocab=257, eos_token=[256])
    lark = llguidance.LLMatcher.grammar_from_lark(to_lark(grammar, lambda _: None, [256]))
    return llguidance.LLMatcher(tokenizer, lark, log_level=0)


TEMPLATES = sorted({answer.template for answer in ANSWERS} - NO_TOOLS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_that_come_follow_the_grammar(name: str) -> None:
    for answer in ANSWERS:
        if answer.template != name:
            continue
        grammar = format_of(name, json.dumps(answer.arguments)).grammar
        if grammar is None:
            continue
        assert isinstance(grammar, LazyGrammar)
        words = [word.encode() for word in grammar.words]
        text = answer.text.encode()
        places = [place for word in words if (place := text.find(word)) >= 0]
        assert bool(places) == bool(answer.calls)
        if not places:
            continue
        called = list(text[min(places) :])
        matcher = matcher_of(grammar)
        assert matcher.try_consume_tokens(called) == len(called)
        assert matcher.is_accepting()


@pytest.mark.parametrize("name", TEMPLATES)
def test_required_calls_follow_the_grammar(name: str) -> None:
    from pyvelo.grammar.compiler import _AFTER

    for answer in ANSWERS:
        if answer.template != name:
            continue
        grammar = format_of(name, json.dumps(answer.arguments), "required").grammar
        assert grammar is not None
        matcher = matcher_of(grammar)
        begun = _AFTER.match(grammar)
        text = "".join(json.loads(begun[1])) if begun else ""
        assert matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
        taken = matcher.try_consume_tokens(list(answer.text.encode()))
        if answer.content and answer.calls:
            assert not matcher.is_accepting()  # the call comes at once
        elif answer.calls:
            assert taken == len(answer.text.encode())
            assert matcher.is_accepting()
        else:
            assert not matcher.is_accepting()


def test_a_named_function_is_the_only_one() -> None:
    named = {"type": "function", "function": {"name": "add"}}
    tools = Tools.of(TOOLS, named)
    assert [one["function"]["name"] for one in tools.functions] == ["add"]
    assert (tools.choice, tools.parallel, tools.asked) == ("required", False, True)
    prompt = upstream_template(QWEN).render(USER, tools=TOOLS)
    found = formats().find(source_of(QWEN), prompt, USER, tools)
    assert found is not None
    assert found.grammar is not None
    assert "weather" not in found.grammar
    assert found.parse(hermes("add", '{"a": 1, "b": 2}')).tool_calls[0].name == "add"


def test_control_tokens_in_a_grammar() -> None:
    model = Letters("[TOOL_CALLS]", "<s>")
    grammar = 'root ::= "<s>a[TOOL_CALLS]" x? # "<s>"\nx ::= [^"\\]<s>] | "\\"<s>\\"" | "b"'
    assert after(model, grammar, "<s>a", ["[TOOL_CALLS]", "no token"]) == (
        '# after [257, "a"]\nroot ::= (<[257]> "a" <[256]>) x? # "<s>"\nx ::= [^"\\]<s>] | "\\"<s>\\"" | "b"'
    )
    shown = formats("[TOOL_CALLS]").find(
        source_of("mistralai-Mistral-Nemo-Instruct-2407"), "x", USER, Tools.of(TOOLS, "required")
    )
    assert shown is not None
    assert shown.shows_controls
    assert "<[256]>" in (shown.grammar or "")


def test_parameters_of_a_format() -> None:
    parts: Any = {"parses": None, "grammar": "root ::= .", "stops": ("x",), "shows_controls": True}
    found = AnswerFormat(**parts)
    params = found.params(SamplingParams(stop="y", max_tokens=3))
    assert (params.grammar, params.stop, params.skip_special_tokens) == ("root ::= .", ("y", "x"), False)
    with pytest.raises(RequestError, match="only one"):
        found.params(SamplingParams(json_schema={}))
    parts["grammar"] = LazyGrammar("root ::= .", ["a"])
    mine = AnswerFormat(**parts).params(SamplingParams(json_schema={}))
    assert (mine.grammar, mine.json_schema, mine.stop) == (None, "{}", ("x",))
    assert AnswerFormat(**parts).params(SamplingParams()).grammar is parts["grammar"]
    parts["grammar"] = LazyGrammar("root ::= ." + " " * MAX_CHARACTERS, ["a"])
    assert AnswerFormat(**parts).params(SamplingParams()).grammar is None
    parts["grammar"] = str(parts["grammar"])
    with pytest.raises(RequestError, match="tools: their grammar has"):
        AnswerFormat(**parts).params(SamplingParams())


@pytest.mark.parametrize(("echo", "content"), [(False, "onetwo"), (True, "two")])
def test_the_prompt_is_removed_from_an_echo_alone(echo: bool, content: str) -> None:
    prompt = ChatPrompt([1], "one", format_of(QWEN))
    sample = Completion(index=0, text="onetwo", token_ids=(1, 2), finish_reason="stop")
    output = RequestOutput("one", (1,), (sample,), Usage(1, 0, 2), RequestTimes(0.0, None, 0.0))
    [found] = parsed([prompt], [(SamplingParams(echo=echo), None)], [output])
    assert found.outputs[0].content == content


def test_another_end_of_the_prompt() -> None:
    with pytest.raises(RequestError, match="begins the answer in another way"):
        formats().find(source_of(QWEN), "no such end", USER, Tools.of(TOOLS, "auto"))
    assert formats().find(source_of(QWEN), "no such end", USER, Tools.of(TOOLS)) is None
    assert formats().find("{{ messages }}", "x", USER, Tools.of(None)) is None


@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_conversations_end_as_upstream_expects(name: str) -> None:
    """Upstream's format fits PyVelo's prompts, whatever was said before."""
    for key in ("turns", "system", "tool_call", "tool_answer"):
        case = CONVERSATIONS[key]
        try:
            prompt = upstream_template(name).render(case["messages"], tools=TOOLS)
        except VeloError:
            continue  # no model answers it
        if ("tool" in key and name in NO_TOOLS) or (name, key) == ("google-gemma-4-31B-it", "tool_answer"):
            continue  # Gemma's template begins no answer after content beside a call
        assert formats().find(source_of(name), prompt, case["messages"], Tools.of(TOOLS)) is not None


# ---- requests ----


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        ("x", None, "tools are a list"),
        (["x"], None, r"tools\[0\] is 'x'"),
        ([{}], None, r"tools\[0\] has the name None"),
        ([{"name": "a b"}], None, r"tools\[0\] has the name 'a b'"),
        ([{"name": "<|im_end|>"}], None, "has the name"),
        ([{"type": "web_search"}], None, r"tools\[0\] has the type 'web_search'"),
        ([{"type": "function", "function": 3}], None, "has the type"),
        ([{"name": "f"}, {"name": "f"}], None, "another tool has the name f"),
        ([{"name": "f", "description": 3}], None, "f: description is 3"),
        ([{"name": "f", "parameters": 3}], None, "f: parameters are 3"),
        ([{"name": "f", "parameters": {"type": "array"}}], None, "f: parameters are"),
        ([{"name": "f", "parameters": {"properties": []}}], None, "f: properties are"),
        ([{"name": "f", "parameters": {"x": object()}}], None, "f: parameters has a object"),
        ([{"name": f"f{i}"} for i in range(513)], None, "513 tools"),
        ([{"name": "f", "description": "x" * 600_000}], None, "KiB"),
        (TOOLS, "sometimes", "tool_choice='sometimes'"),
        (TOOLS, 3, "tool_choice=3"),
        (TOOLS, {"type": "function"}, "tool_choice="),
        (TOOLS, {"function": {"name": "g"}}, "tool_choice: 'g'"),
        (None, "required", "needs tools"),
    ],
)
def test_bad_tools_are_refused(tools: Any, choice: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Tools.of(tools, choice)


def test_other_forms_of_tools() -> None:
    inner = TOOLS[0]["function"]
    assert Tools.of([inner]) == Tools.of([TOOLS[0]])
    assert Tools.of([{"name": "f"}]).functions[0]["function"]["parameters"] == {}
    assert Tools.of(TOOLS, {"name": "add"}).choice == "required"
    assert not Tools.of(TOOLS, "none").asked
    with pytest.raises(RequestError, match="parallel_tool_calls=1"):
        Tools.of(TOOLS, None, 1)  # type: ignore[arg-type]
    lists = function("f", x={"type": "array"})
    assert Tools.of([lists]).functions[0]["function"]["parameters"]["properties"]["x"]["items"] == {}


@pytest.mark.parametrize(
    "arguments", ["{", '{"a": 1', "", "null", '"x"', "[1]", "{'a': 1}", "\0", 3, None, ["x"]]
)
@pytest.mark.parametrize("name", [QWEN, "Qwen3-Coder", "mistralai-Mistral-Nemo-Instruct-2407", OSS])
def test_malformed_arguments_in_the_history(name: str, arguments: Any) -> None:
    call = {"type": "function", "id": "123456789", "function": {"name": "add", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "123456789", "name": "add"},
    ]
    try:
        prompt = upstream_template(name).render(messages, tools=TOOLS)
    except RequestError:
        prompt = upstream_template(name).render(USER, tools=TOOLS)
    found = formats().find(source_of(name), prompt, messages, Tools.of(TOOLS, "auto"))
    assert found is not None
    assert all(call["function"]["arguments"] == "{}" for call in history(messages)[1]["tool_calls"])


# ---- the native part ----


def test_wrong_requests() -> None:
    chat = ChatFormat(source_of(QWEN))
    for request in (
        {},
        {"messages": 3},
        {"messages": [3]},
        {"messages": [{"role": 3, "content": "x"}]},
        {"messages": USER, "tools": {}},
        {"messages": USER, "tools": [3]},
        {"messages": USER, "tools": [{"type": "function", "function": {"name": 3}}]},
        {"messages": USER, "tool_choice": "maybe"},
        {"messages": USER, "enable_thinking": "x"},
        {"messages": [{"role": "user", "content": "x" * (1 << 20)}]},
    ):
        with pytest.raises(ConfigError):
            chat.plan(request)
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(ConfigError, match="nested"):
        chat.plan({"messages": USER, "arguments": {"x": deep}})
    plan = chat.plan({"messages": []})
    chat.close()
    assert plan.parse("x")["content"] == "x"
    with pytest.raises(ComputeError, match="not in the model's format"):
        ChatFormat(source_of(QWEN)).plan({"messages": USER, "tools": TOOLS}).parse('<tool_call>\n{"name": 3}')


@pytest.mark.parametrize(
    "source", ["", "x" * 70_000, "{% if %}", "{{ '", "{{ ((((", "{%" * 30_000, "{{ " + "(" * 60_000]
)
def test_damaged_templates(source: str) -> None:
    with pytest.raises(ConfigError):
        ChatFormat(source).plan({"messages": USER})


HOSTILE = {**{str(number): source for number, source in enumerate(BROKEN)}, **ENDLESS, **HUGE}
WORST = ("itself", "deep")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("names", [WORST, pytest.param(("",), marks=pytest.mark.slow)], ids=["worst", "all"])
def test_hostile_templates_do_not_end_the_process(names: tuple[str, ...]) -> None:
    ended = []
    for name in HOSTILE.keys() - SLOW:
        if not any(part in name for part in names):
            continue
        child = os.fork()
        if child == 0:
            with suppress(VeloError):
                ChatFormat(HOSTILE[name]).plan({"messages": USER, "tools": TOOLS})
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            ended.append(name)
    assert ended == []
