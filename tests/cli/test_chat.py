"""The chat without a model: what commands do, what is kept, and what is said where something fails."""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo import LLM, SamplingParams
from pyvelo.cli import chat_commands
from pyvelo.cli.app import execute
from pyvelo.cli.chat import Chat
from pyvelo.cli.chat_loop import hear, run_lines
from pyvelo.cli.conversation import Conversation, Message
from pyvelo.cli.markdown import split_blocks
from pyvelo.cli.screen import PlainScreen, fitting
from pyvelo.cli.talker import LlmTalker
from pyvelo.errors import ConfigError, RequestError
from pyvelo.outputs import Delta, StreamPiece, Usage


def piece_of(text: str, *of: Any, **others: Any) -> StreamPiece:
    """A piece of an answer in which all text is content."""
    return StreamPiece(text, *of, **others, deltas=(Delta(content=text),))


class FakeTalker:
    """Talker that answers with the number of words, and has room for so many messages."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.asked: list[list[Message]] = []
        self.fail: BaseException | None = None
        self.closed = 0
        self.thinks: bool | None = None

    def fits(self, messages: list[Message]) -> bool:
        return len(messages) <= self.room

    def stream(self, messages: list[Message]) -> Generator[StreamPiece, None, None]:
        self.asked.append(messages)
        try:
            yield piece_of("answer ", (1,))
            if self.fail is not None:
                raise self.fail
            usage = Usage(prompt_tokens=10, cached_tokens=7, completion_tokens=3)
            yield piece_of(str(len(self.asked)), (2, 3), "stop", usage=usage)
        finally:
            self.closed += 1

    def think(self, wanted: bool) -> None:
        self.thinks = wanted

    def describe(self) -> str:
        return "a cache"

    def describe_model(self) -> str:
        return "a model"

    def describe_tokens(self, messages: list[Message]) -> str:
        return f"{len(messages)} messages"

    def describe_usage(self, usage: Usage) -> str:
        return f"{usage.total_tokens} tokens"


class FakeScreen:
    def __init__(self, lines: Sequence[str | type[BaseException]] = ()) -> None:
        self.lines = list(lines)
        self.shown = ""
        self.notes: list[str] = []
        self.told = ""
        self.sent = ""

    def ask(self) -> str | None:
        line = self.lines.pop(0) if self.lines else None
        if line is not None and not isinstance(line, str):
            raise line
        return line

    def show(self, text: str) -> None:
        self.shown += text

    def show_reasoning(self, text: str) -> None:
        self.shown += f"({text})"

    def finish(self) -> None:
        self.shown += "|"

    def status(self, text: str) -> None:
        self.told = text

    def control(self, sequence: str) -> bool:
        self.sent += sequence
        return True

    def note(self, text: str) -> None:
        self.notes.append(text)


def talk(*lines: str | type[BaseException], talker: FakeTalker | None = None) -> tuple[Chat, FakeScreen]:
    screen = FakeScreen(lines)
    chat = Chat(talker or FakeTalker(), screen, Conversation())
    run_lines(chat)
    return chat, screen


def said(chat: Chat) -> list[tuple[str, str | None]]:
    return [(turn.user, turn.answer) for turn in chat.conversation.turns]


def test_turns_follow_one_another() -> None:
    talker = FakeTalker()
    chat, screen = talk("one", "", "  ", KeyboardInterrupt, "two", talker=talker)
    assert said(chat) == [("one", "answer 1"), ("two", "answer 2")]
    assert screen.shown == "answer 1|answer 2|"
    assert talker.asked[1] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "answer 1"},
        {"role": "user", "content": "two"},
    ]


def test_commands() -> None:
    talker = FakeTalker()
    chat, screen = talk(
        "/undo", "/retry", "/system Be brief.", "one", "two", "/undo", "/retry",
        "/stat", "/stats", "/help", talker=talker,
    )  # fmt: skip
    assert said(chat) == [("one", "answer 3")]
    assert talker.asked[-1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
    ]
    assert screen.notes[:2] == ["the conversation is empty"] * 2
    assert screen.notes[-3] == "there is no '/stat': do you mean /stats? /help lists the commands"
    assert "7 of 10 tokens" in screen.notes[-2]
    assert "3 tokens, the first after" in screen.notes[-2]
    assert "a cache" in screen.notes[-2]
    assert "/retry" in screen.notes[-1]
    hear(chat, "/reset")
    assert said(chat) == []
    assert chat.conversation.system == "Be brief."
    hear(chat, "/system")
    assert screen.notes[-1] == "the system message is removed"
    assert chat.conversation.messages() == []
    hear(chat, "/system")
    assert screen.notes[-1] == "there is no system message"


@pytest.mark.parametrize("end", ["/exit", "/quit", "/bye", "exit", "quit", " /quit "])
def test_the_end(end: str) -> None:
    chat, screen = talk("one", end, "two")
    assert said(chat) == [("one", "answer 1")]
    assert screen.lines == ["two"]


def test_a_stopped_answer_is_kept_as_far_as_it_came() -> None:
    talker = FakeTalker()
    talker.fail = KeyboardInterrupt()
    chat, screen = talk("one", talker=talker)
    assert said(chat) == [("one", "answer ")]
    assert screen.shown == "answer |"
    assert talker.closed == 1


def test_what_fails_is_said_and_loses_nothing() -> None:
    talker = FakeTalker()
    chat, screen = talk("one", talker=talker)
    talker.fail = RequestError("it broke")
    hear(chat, "two")
    hear(chat, "/retry")
    assert said(chat) == [("one", "answer 1")]
    assert screen.notes == ["it broke"] * 2
    talker.fail = None
    hear(chat, "three")
    assert said(chat)[1:] == [("three", "answer 4")]


def test_a_full_context_lets_the_oldest_turns_go_and_says_so() -> None:
    talker = FakeTalker(room=4)
    chat, screen = talk("/system S", "one", "two", "three", talker=talker)
    assert [message["content"] for message in talker.asked[-1]] == ["S", "two", "answer 2", "three"]
    assert [user for user, _ in said(chat)] == ["one", "two", "three"]  # as it is saved
    assert len(Conversation.from_json(chat.conversation.to_json()).turns) == 3
    for text in ("/undo", "/undo", "four"):
        hear(chat, text)
    assert [user for user, _ in said(chat)] == ["one", "four"]
    assert talker.asked[-1][1]["content"] == "one"
    assert "the context is full: the oldest turn has left the conversation" in screen.notes


@pytest.mark.parametrize("line", ["a message that never fits", "/retry"])
def test_a_message_that_never_fits_costs_no_turn(line: str) -> None:
    talker = FakeTalker()
    chat, screen = talk("one", "two", talker=talker)
    before = said(chat)
    talker.room, talker.fail = 0, RequestError("the prompt is too long")
    hear(chat, line)
    assert said(chat) == before
    assert screen.notes == ["the prompt is too long"]


@pytest.mark.parametrize("fail", [KeyboardInterrupt(), RequestError("it broke")])
def test_an_answer_that_fails_keeps_the_turns_that_had_to_go(fail: BaseException) -> None:
    talker = FakeTalker()
    chat, _ = talk("one", "two", talker=talker)
    before = said(chat)
    talker.room = 3
    talker.stream = MethodType(_raising(fail), talker)  # type: ignore[method-assign]
    hear(chat, "three")
    assert said(chat) == before


def _raising(fail: BaseException) -> Callable[..., Generator[StreamPiece, None, None]]:
    def stream(_: FakeTalker, messages: list[Message]) -> Generator[StreamPiece, None, None]:
        raise fail
        yield

    return stream


def test_a_file_that_is_no_chat_is_not_replaced(tmp_path: Path) -> None:
    letter, chat_file, empty = tmp_path / "letter.txt", tmp_path / "chat.json", tmp_path / "empty"
    letter.write_text("Dear")
    empty.touch()
    _, screen = talk(
        "one", f"/save {letter}", f"/save {chat_file}", "two", f"/save {chat_file}", f"/save {empty}"
    )
    assert letter.read_text() == "Dear"
    assert screen.notes[0] == f"{str(letter)!r} exists and is no chat of /save: name another file"
    assert chat_file.read_text() == empty.read_text()
    assert len(Conversation.from_json(empty.read_text()).turns) == 2


def test_a_name_that_the_locale_cannot_write_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> bytes:
        raise UnicodeEncodeError("ascii", name, 0, 1, "not in range")

    monkeypatch.setattr(os, "fsencode", refuse)
    _, screen = talk("one", "/save é.json", "/load é.json")
    assert [note.partition(":")[0] for note in screen.notes] == ["'é.json'"] * 2


def test_ctrl_c_in_a_command_ends_the_command_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(chat: Chat, _: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(chat_commands.COMMANDS, "edit", interrupted)
    chat, screen = talk("one", "/edit", "two")
    assert [user for user, _ in said(chat)] == ["one", "two"]
    assert screen.notes == ["stopped"]


def test_a_conversation_is_saved_and_loaded(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    chat, _ = talk("/system Sei höflich.", "eins", f"/save {file}", "zwei")
    other, screen = talk(f"/load {file}")
    assert other.conversation == Conversation("Sei höflich.", chat.conversation.turns[:1])
    assert screen.notes == [f"1 turn from {file}"]


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "[[", '{"format": "x", "messages": []}', "\xff\xfe", "[" * 9999),
        '{"format": "pyvelo chat 1", "messages": [{"role": "user", "content": "a"}]}',
    ],
)
def test_what_is_no_saved_chat_changes_nothing(tmp_path: Path, content: str) -> None:
    file = tmp_path / "chat.json"
    file.write_bytes(content.encode("latin-1"))
    chat, screen = talk("one", f"/load {file}", f"/load {tmp_path}", f"/load {tmp_path}/no", "/load", "/save",
                        f"/save {tmp_path}")  # fmt: skip
    assert said(chat) == [("one", "answer 1")]
    assert len(screen.notes) == 6


def test_a_file_without_messages_says_so() -> None:
    with pytest.raises(ConfigError, match="not a chat of /save: it is no JSON"):
        Conversation.from_json("# A title")
    with pytest.raises(ConfigError, match="not a chat of /save: it has no 'messages'"):
        Conversation.from_json('{"requests": []}')


def test_speed_without_an_answer() -> None:
    assert talk("/stats")[1].notes[0].splitlines()[0] == "there is no answer yet"


@pytest.mark.parametrize("content", ["[1]", "5", '{"format": "pyvelo chat 1", "messages": 5}'])
def test_json_of_another_shape_is_refused_in_our_words(content: str) -> None:
    with pytest.raises(ConfigError, match="not a chat of /save: it has another form"):
        Conversation.from_json(content)


@pytest.mark.parametrize("roles", [["assistant"], ["user", "user"], ["user", "system"], ["tool"]])
def test_turns_in_the_wrong_order_are_refused(roles: list[str]) -> None:
    messages = ", ".join(f'{{"role": "{role}", "content": "x"}}' for role in roles)
    with pytest.raises(ConfigError, match="not a chat"):
        Conversation.from_json(f'{{"format": "pyvelo chat 1", "messages": [{messages}]}}')


def test_lines_that_end_with_a_backslash_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one\\", "two", "three\\"])

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    screen = PlainScreen()
    assert [screen.ask() for _ in range(3)] == ["one\ntwo", "three", None]


BLOCK_PARTS = ["a", "\n", "\n\n", "```", "~~~", "```py\n", " ", "# b\n"]


@given(st.lists(st.sampled_from(BLOCK_PARTS)).map("".join))
def test_blocks_are_split_without_loss(text: str) -> None:
    done, rest = split_blocks(text)
    assert "".join(done) + rest == text
    assert all(block.endswith("\n") for block in done)


def test_a_code_block_stays_whole() -> None:
    assert split_blocks("a\n\nb\n\nc") == (["a\n\n", "b\n\n"], "c")
    assert split_blocks("a\n\n```\nx\n\ny\n") == (["a\n\n"], "```\nx\n\ny\n")
    assert split_blocks("```\nx\n\n```\n\nz") == (["```\nx\n\n```\n\n"], "z")


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ((), {}),
        (("--temperature", "0.25", "--top-k", "3"), {"temperature": 0.25, "top_k": 3}),
        (("-n", "9"), {"max_tokens": 9}),
    ],
)
def test_a_chat_is_drawn_as_by_llm_chat(
    options: Sequence[str], changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[SamplingParams, SamplingParams]] = []

    class Recorded(LlmTalker):
        def __init__(self, llm: LLM, path: str, params: SamplingParams, *others: Any) -> None:
            super().__init__(llm, path, params, *others)
            seen.append((params, llm.get_default_sampling_params()))

    monkeypatch.setattr("pyvelo.cli.talker.LlmTalker", Recorded)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert execute(["chat", *options]) == 0
    ((params, default),) = seen
    assert params == replace(default, **changed)


# ---- reasoning ----


class Thinker(FakeTalker):
    """Talker that thinks before it answers."""

    def stream(self, messages: list[Message]) -> Generator[StreamPiece, None, None]:
        self.asked.append(messages)
        yield StreamPiece("<think>", (1,))
        yield StreamPiece("hm ", (2,), deltas=(Delta(reasoning="hm "),))
        yield StreamPiece("so", (3,), deltas=(Delta(reasoning="so"),))
        if self.fail is not None:
            raise self.fail
        yield StreamPiece("</think>42", (4,), "stop", deltas=(Delta(content="42"),))


def ask(reasoning: str, talker: FakeTalker | None = None) -> tuple[Chat, FakeScreen]:
    screen = FakeScreen(["why?", "and?"])
    chat = Chat(talker or Thinker(), screen, Conversation(), reasoning)
    run_lines(chat)
    return chat, screen


def test_reasoning_is_shown_apart_and_is_no_part_of_the_answer() -> None:
    talker = Thinker()
    chat, screen = ask("show", talker)
    assert screen.shown == "(hm )(so)42|" * 2
    assert said(chat) == [("why?", "42"), ("and?", "42")]
    assert talker.asked[1][1] == {"role": "assistant", "reasoning_content": "hm so", "content": "42"}
    assert Conversation.from_json(chat.conversation.to_json()) == chat.conversation


def test_hidden_reasoning_is_noted_once() -> None:
    _, screen = ask("hide")
    assert screen.shown == "42|" * 2
    assert screen.notes == ["thinking ... (/reasoning shows it afterwards)"] * 2
    _, screen = ask("off")
    assert (screen.shown, screen.notes) == ("42|" * 2, [])


def test_hidden_reasoning_is_unfolded() -> None:
    chat, screen = ask("hide")
    hear(chat, "/reasoning")
    assert screen.shown == "42|" * 2 + "(hm so)|"
    _, screen = talk("/reasoning", "hello", "/reasoning")
    assert screen.notes == ["there is no answer yet", "the last answer has no reasoning"]


def test_a_turn_that_is_stopped_within_its_reasoning_can_be_answered_again() -> None:
    talker = Thinker()
    talker.fail = KeyboardInterrupt()
    chat, screen = ask("show", talker)
    assert said(chat) == [("why?", ""), ("and?", "")]
    talker.fail = None
    hear(chat, "/retry")
    assert said(chat)[1] == ("and?", "42")
    assert screen.shown.endswith("(hm )(so)42|")


def test_thinking_is_switched() -> None:
    talker = FakeTalker()
    _, screen = talk("/think off", "/think", "/think on", talker=talker)
    assert talker.thinks is True
    assert screen.notes[1] == "give /think on or /think off"


# ---- commands ----


@pytest.mark.parametrize(
    "text",
    [
        *("/usr/bin/env is what?", "/ is a slash", "//", "/nothing", "/undo now", "/help me please"),
        *(
            "/edit hello",
            "/think about it",
            "/fork the project",
            "/hepl me",
            "/quit smoking: how?",
            "/exit now",
            "/? what",
            "/model\nof a bridge",
        ),
    ],
)
def test_what_is_no_command_is_a_message(text: str) -> None:
    chat, _ = talk(text)
    assert said(chat) == [(text, "answer 1")]


def test_several_turns_are_removed() -> None:
    chat, screen = talk(*"abcde", "/undo 3", "/undo 0", "/undo 3", "/undo ²", "/model x.gguf")
    assert said(chat) == [("a", "answer 1"), ("b", "answer 2")]
    assert screen.notes[:3] == ["removed: e", "removed: d", "removed: c"]
    assert [note.split(": ")[1] for note in screen.notes[3:6]] == ["give the number of turns, 1 to 2"] * 3
    assert "pyvelo chat MODEL" in screen.notes[6]


def test_forks_go_on_by_themselves() -> None:
    chat, screen = talk("one", "/fork", "two", "/fork 1", "three", "/fork 3", "/fork x", "/fork 0", "/fork ²")
    assert said(chat) == [("one", "answer 1"), ("three", "answer 3")]
    assert [turn.user for turn in chat.conversations[1].turns] == ["one", "two"]
    assert screen.notes[0] == "1: 1 turn, the last: one\n2: 1 turn (here), the last: one"
    assert screen.notes[1] == "1: 1 turn (here), the last: one\n2: 2 turns, the last: two"
    assert [note.split(":")[1] for note in screen.notes[2:]] == [
        " give the number of a conversation, 1 to 2"
    ] * 4
    assert chat.failed


def test_the_last_answer_is_copied() -> None:
    _, screen = talk("/copy", "one", "/copy")
    assert screen.notes[0] == "there is no answer yet"
    assert screen.sent == "\x1b]52;c;YW5zd2VyIDE=\a"


def test_figures_of_the_conversation() -> None:
    _, screen = talk("one", "/tokens", "/model")
    assert screen.notes == ["2 messages", "a model"]
    assert screen.told.endswith("cached 7/10, 13 tokens")


@pytest.mark.parametrize(
    ("program", "sent", "note"),
    [
        ("import sys; open(sys.argv[1], 'w').write('from an\\neditor\\n')", "from an\neditor", None),
        ("", None, "nothing is sent"),
        ("import sys; open(sys.argv[1], 'w')", None, "nothing is sent"),
        ("raise SystemExit(1)", None, "nothing is sent"),
        ("import sys; open(sys.argv[1], 'wb').write(b'\\xff')", None, "the editor wrote no UTF-8 text"),
    ],
    ids=["changed", "as it was", "emptied", "failed", "no text"],
)
def test_a_message_is_written_in_the_editor(
    program: str, sent: str | None, note: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "an editor.py"
    script.write_text(program)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", shlex.join([sys.executable, str(script)]))
    monkeypatch.setattr(chat_commands, "_has_terminal", lambda: True)
    chat, screen = talk("/edit")
    assert [turn.user for turn in chat.conversation.turns] == ([] if sent is None else [sent])
    assert screen.notes == [note or sent]


@pytest.mark.parametrize("editor", ["no-such-editor", "'"])
def test_an_editor_that_cannot_run_is_named(editor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_commands, "_has_terminal", lambda: True)
    for variable in ("EDITOR", "VISUAL"):
        monkeypatch.delenv("VISUAL", raising=False)
        monkeypatch.setenv(variable, editor)
        chat, screen = talk("/edit")
        assert f"the editor {editor!r} cannot run" in screen.notes[0]
        assert f"set ${variable} to" in screen.notes[0]
        assert not chat.conversation.turns


def test_an_editor_needs_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISUAL", shlex.join([sys.executable, "-c", "raise SystemExit(3)"]))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    chat, screen = talk("/edit")
    assert screen.notes == ["/edit opens an editor, which needs a terminal: write the message as a line"]
    assert not chat.conversation.turns


# ---- options ----


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--template-arg", "thinking"), "give NAME=VALUE"),
        (("--template-arg", "a b=1"), "give NAME=VALUE"),
        (("--template-arg", "messages=1"), "--template-arg messages is set by the call: remove it"),
        (("What is a block table?",), "'What is a block table?' is read as MODEL: give it to pyvelo run"),
        (("--reasoning", "loud"), "give show, hide or off"),
        (("--reasoning", "show", "--no-think"), "leave --reasoning 'show' out"),
        (("--chat-template", "no such file"), "cannot be read"),
    ],
)
def test_options_that_are_refused(
    options: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["chat", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_file_whose_name_has_a_space_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["chat", "my models/x.gguf"]) == 1
    assert "there is no model at my models/x.gguf" in capsys.readouterr().err


def test_template_and_arguments_reach_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ raise_exception('got ' ~ n ~ ' ' ~ word ~ ' ' ~ enable_thinking) }}")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    options = ["--template-arg", "n=[1, 2]", "--template-arg", "word=plain", "--no-think"]
    assert execute(["chat", "--chat-template", str(template), *options]) == 1
    assert "got [1, 2] plain False" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["/show me the way", "/image of a cat", "/set theory"])
def test_messages_that_begin_like_a_command_of_another_program(text: str) -> None:
    chat, _ = talk(text)
    assert [user for user, _ in said(chat)] == [text]


def test_the_commands_of_other_programs() -> None:
    chat, screen = talk("one", "/clear", "/?", "/set parameter temperature 0", "/show info")
    assert chat.conversation.turns == []
    assert screen.notes[0] == "forgotten"
    assert "/retry" in screen.notes[1]
    assert ["/system" in screen.notes[2], "/model" in screen.notes[3]] == [True, True]


def test_the_status_line_is_of_the_conversation_on_the_screen(tmp_path: Path) -> None:
    (file := tmp_path / "saved").write_text(Conversation().to_json())
    for command in ("/reset", "/fork 1", f"/load {file}"):
        screen = FakeScreen([command])
        screen.told = "12.5 tokens/s"
        run_lines(Chat(FakeTalker(), screen, Conversation()))
        assert screen.told == ""


@pytest.mark.parametrize("width", range(8, 90, 9))
def test_the_status_line_fits(width: int) -> None:
    fields = "12.5 tokens/s, cached 1,024/2,048, context 2,100/4,096, KV 157.5 KiB"
    shown = fitting(fields, width)
    assert fields.startswith(shown)
    assert len(shown) <= max(width, len("12.5 tokens/s"))
    assert fields[len(shown) :][:2] in (", ", "")


def test_the_status_line_of_a_long_chat_fits_80_columns() -> None:
    usage = Usage(prompt_tokens=123_456, cached_tokens=123_455, completion_tokens=654)

    class Model:
        n_ctx = 131_072

        def stats(self) -> SimpleNamespace:
            return SimpleNamespace(pool_bytes=1023 << 20, tokens_total=usage.total_tokens)

    class Long(FakeTalker):
        def stream(self, messages: list[Message]) -> Generator[StreamPiece, None, None]:
            yield piece_of("answer", (1,), "stop", usage=usage)

        def describe_usage(self, usage: Usage) -> str:
            return LlmTalker(cast(Any, Model()), "", SamplingParams(), {}).describe_usage(usage)

    _, screen = talk("one", talker=Long())
    rate, _, rest = screen.told.partition(" ")
    line = f"1234.5 {rest}"
    assert rate == "0.0"
    assert line == "1234.5 tokens/s, cached 123,455/123,456, context 124,110/131,072, KV 1023.0 MiB"
    assert fitting(line, 80) == line
    assert fitting(line, 40) == "1234.5 tokens/s, cached 123,455/123,456"
