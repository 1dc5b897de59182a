"""Conversion of conversations to the tokens of a prompt, by the model's chat template."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from pyvelo.chat.answer_format import AnswerFormat, AnswerFormats, AnswerReader
from pyvelo.chat.marked import Marked, mask_of
from pyvelo.chat.messages import Message
from pyvelo.chat.meter import Limits
from pyvelo.chat.template import BUILT_IN, ChatTemplate, is_jinja
from pyvelo.chat.tools import Tools
from pyvelo.errors import RequestError, shown
from pyvelo.lazy import lazy_property
from pyvelo.outputs import Completion, RequestOutput
from pyvelo.sampling import SamplingParams, chat_params

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pyvelo.native import Model

__all__ = ["ChatOptions", "ChatPrompt", "Chats", "encode", "is_one", "parsed", "with_formats"]

_log = logging.getLogger("pyvelo")

T = TypeVar("T")

_WORD = re.compile(r"\w+")

KEY = "tokenizer.chat_template"
FALLBACK = "chatml"


class ChatOptions(TypedDict, total=False):
    """Arguments of `chat` and `chat_stream` beside messages and sampling parameters.

    tools: JSON schemas of functions. The model's template for tools is used if it has one.
    tool_choice: "auto" (the default): the model may call functions; "none"; "required"; or {"type":
        "function", "function": {"name": ...}}: it must call this one.
    parallel_tool_calls: an answer may have several calls; default True.
    chat_template: Jinja source that replaces the model's template, or a template's name: a built-in one
        ("chatml") or another one of the model.
    add_generation_prompt: write the beginning of the answer; default True.
    continue_final_message: continue the last message, which must be the assistant's; default False.
    template_arguments: other variables of the template, such as {"enable_thinking": False}.
    chat_template_kwargs: vLLM's name of template_arguments.
    """

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    chat_template: str | ChatTemplate | None
    add_generation_prompt: bool
    continue_final_message: bool
    template_arguments: Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None


class ChatPrompt(tuple[int, ...]):
    """Tokens of a conversation, and its text.

    answer: format of the answer; None: plain text, or not known.
    """

    text: str
    answer: AnswerFormat | None

    def __new__(cls, tokens: Sequence[int], text: str, answer: AnswerFormat | None = None) -> ChatPrompt:
        self = super().__new__(cls, tokens)
        self.text = text
        self.answer = answer
        return self

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of the answer, with the grammar and the stop strings of its format."""
        known = self.answer is not None and isinstance(params, SamplingParams)
        return self.answer.params(params) if self.answer is not None and known else params

    def reader(self, params: SamplingParams) -> AnswerReader:
        """Return a parser of the answers."""
        return AnswerReader(self.answer, self.text if params.echo else "")

    def parsed(self, output: RequestOutput, echo: bool) -> RequestOutput:
        """Return an output with content, reasoning and tool calls of each sample."""
        if self.answer is None:
            return output
        before = self.text if echo else ""
        return replace(output, outputs=tuple(_parsed(one, self.answer, before) for one in output.outputs))


class Chats:
    """Chat templates of one model, each compiled at its first use. Thread-safe.

    Args:
        template: Jinja source that replaces the model's own templates.
        limits: of the templates that calls give; None: the same as for the model's own.
    """

    def __init__(self, model: Model, template: str | None = None, limits: Limits | None = None) -> None:
        self._model = model
        self._replacement, self._limits = template, limits
        self._lock = threading.Lock()
        self._known: dict[str, ChatTemplate] = {}
        self._given: dict[str, ChatTemplate] = {}
        self._formats = AnswerFormats(model)
        self._warned = False
        self._left_out: set[str] = set()  # roles
        self._leaves_out_tools = False

    @lazy_property
    def params(self) -> SamplingParams:
        """Sampling parameters of an answer if the caller gives none."""
        return chat_params(self._model.meta)

    @property
    def template(self) -> ChatTemplate:
        """Default template: the model's first, or a fallback."""
        return self._templates().get("") or self._templates()[FALLBACK]

    def prompts(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        chat_template: str | ChatTemplate | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ChatPrompt]:
        """Return the prompts of one conversation or several, always as a list.

        Args:
            messages: one conversation, or a list of them; for the others see `ChatOptions`.

        Raises:
            RequestError: a conversation or an argument is not valid.
            TemplateError: the template rejects the conversation.
        """
        if template_arguments is not None and chat_template_kwargs is not None:
            raise RequestError(
                "template_arguments and chat_template_kwargs are two names of one argument: give one of them"
            )
        one = is_one(messages)
        conversations = cast(Any, [messages] if one else messages)
        functions = Tools.of(tools, tool_choice, parallel_tool_calls)
        template = self._chosen(chat_template, bool(functions.functions))
        arguments = chat_template_kwargs if template_arguments is None else template_arguments
        begins = add_generation_prompt and not continue_final_message
        if functions.asked and not begins:
            raise RequestError(
                "tool_choice needs an answer from its beginning: leave continue_final_message out"
            )
        found = []
        for number, conversation in enumerate(conversations):
            try:
                text = template.render_marked(
                    conversation,
                    tools=tools,
                    add_generation_prompt=begins,
                    arguments=arguments,
                )
                if continue_final_message:
                    text = _cut(text, conversation[-1])
                shown = str.__str__(text)
                self._note_left_out(conversation, functions, shown)
                answer = self._answer(template, shown, conversation, functions, arguments) if begins else None
            except RequestError as error:
                if one:
                    raise
                raise type(error)(f"conversation {number}: {error}") from error
            found.append(ChatPrompt(encode(self._model, text), shown, answer))
        return found

    def one(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> ChatPrompt:
        """Return the prompt of one conversation."""
        if not is_one(messages):
            raise RequestError("a stream answers one conversation: give a list of one message or more")
        return self.prompts(messages, **options)[0]

    def _note_left_out(self, messages: Sequence[Message], tools: Tools, prompt: str) -> None:
        """Warn once of each role whose messages a template leaves out, and of tools.

        Templates may leave out parts of earlier answers, and escape or strip texts. So one word of each role
        is looked for, and none of the assistant's.
        """
        words: dict[str, str] = {}
        for message in messages:
            role, content = message["role"], message.get("content")
            if role in words or role == "assistant" or not isinstance(content, str) or len(words) == 8:
                continue
            if found := _WORD.findall(content[:1000]):
                words[role] = max(found, key=len)
        for role, word in words.items():
            if word not in prompt and role not in self._left_out:
                self._left_out.add(role)
                _log.warning(
                    "the chat template leaves out messages of the role %s: the model does not see them",
                    shown(role),
                )
        names = [each["function"]["name"] for each in tools.functions if tools.choice != "none"]
        if names and not self._leaves_out_tools and not any(name in prompt for name in names):
            self._leaves_out_tools = True
            _log.warning(
                "the chat template leaves out tools: the model cannot call them; ask one whose template has "
                "them, or give a template with chat_template= (--chat-template)"
            )

    def _answer(
        self,
        template: ChatTemplate,
        prompt: str,
        messages: Sequence[Message],
        tools: Tools,
        arguments: Mapping[str, Any] | None,
    ) -> AnswerFormat | None:
        """Return the format of the answer; None for a template of a request.

        Upstream's engine runs templates with limits that a hostile one could still use for seconds of a core.
        """
        if all(template is not known for known in self._templates().values()):
            if tools.asked:
                raise RequestError("tool_choice needs a chat template of the model: leave chat_template out")
            return None
        return self._formats.find(template.source, prompt, messages, tools, arguments)

    def _chosen(self, asked: str | ChatTemplate | None, tools: bool) -> ChatTemplate:
        templates = self._templates()
        if isinstance(asked, ChatTemplate):
            return asked
        if asked is None:
            if "" not in templates and not self._warned:
                self._warned = True
                _log.warning(
                    "the model has no chat template; %s is used, which it may not have been trained on: "
                    "name another with chat_template= (--chat-template)",
                    FALLBACK,
                )
            return templates["tool_use"] if tools and "tool_use" in templates else self.template
        if not isinstance(asked, str):
            raise RequestError(f"chat_template={shown(asked)}: give Jinja, the name of a template, or None")
        if asked in templates and asked:
            return templates[asked]
        if not is_jinja(asked):
            names = ", ".join(sorted(name for name in templates if name))
            raise RequestError(f"chat_template={asked[:80]!r} is neither Jinja nor one of {names}")
        with self._lock:
            if asked not in self._given:
                if len(self._given) >= 16:
                    self._given.clear()
                self._given[asked] = self._make(asked, "chat_template", self._limits)
            return self._given[asked]

    def _templates(self) -> dict[str, ChatTemplate]:
        """Return the model's templates and the built-in ones by name; the model's first has the name ""."""
        with self._lock:
            if not self._known:
                named = {name: self._make(source, name) for name, source in BUILT_IN.items()}
                for key, source in self._sources().items():
                    named[key[len(KEY) + 1 :]] = self._make(source, key)
                self._known = named
            return self._known

    def _sources(self) -> Mapping[str, str]:
        """Return the templates of the model by their keys, or what replaces them."""
        if self._replacement is not None:
            return {KEY: self._replacement}
        return {
            key: source for key, source in self._model.meta.items() if key == KEY or key.startswith(KEY + ".")
        }

    def _make(self, source: str, name: str, limits: Limits | None = None) -> ChatTemplate:
        bos, eos = self._text(self._model.vocab.bos), self._text(self._model.vocab.eos)
        return ChatTemplate(source, name=name, bos=bos, eos=eos, limits=limits)

    def _text(self, token: int | None) -> str:
        if token is None:
            return ""
        return self._model.token_bytes(token, special=True).decode("utf-8", "replace")


def is_one(messages: Any) -> bool:
    """Return whether `messages` is one conversation; an empty list is a list of no conversations."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        return True
    return bool(messages) and (not isinstance(messages[0], Sequence) or isinstance(messages[0], (str, bytes)))


def with_formats(
    prompts: Sequence[ChatPrompt], asked: Sequence[tuple[SamplingParams, T]]
) -> list[tuple[SamplingParams, T]]:
    """Return the parameters of each prompt with the format of its answer."""
    return [(prompt.params(params), one) for prompt, (params, one) in zip(prompts, asked, strict=True)]


def parsed(
    prompts: Sequence[ChatPrompt], asked: Sequence[tuple[SamplingParams, T]], outputs: Sequence[RequestOutput]
) -> list[RequestOutput]:
    """Return outputs with content, reasoning and tool calls."""
    given = zip(prompts, asked, outputs, strict=True)
    return [prompt.parsed(output, params.echo) for prompt, (params, _), output in given]


def _parsed(sample: Completion, answer: AnswerFormat, before: str) -> Completion:
    """Return a sample with its content, reasoning and tool calls; its text begins with `before`."""
    found = answer.parse(sample.text.removeprefix(before))
    return replace(sample, content=found.content, reasoning=found.reasoning, tool_calls=found.tool_calls)


def encode(model: Model, text: Marked) -> list[int]:
    """Return the tokens of a rendered conversation, after the BOS token if the model adds one.

    The name of a control token becomes that token if the template wrote it, and stays text if a user did. If
    no user's text contains such a name, the text is tokenized as a whole. User-defined tokens of the
    vocabulary are recognized in every text.
    """
    shown = str.__str__(text)
    tokens = model.tokenize(shown, add_special=False, parse_special=True)
    if any(1 in text.mask[begin:end] for begin, end, _ in _controls(model, shown, tokens)):
        tokens = _encode_apart(model, shown, text.mask)
    bos = model.vocab.bos
    if model.vocab.add_bos and bos is not None and tokens[:1] != [bos]:
        tokens.insert(0, bos)
    return tokens


def _controls(model: Model, text: str, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the control tokens of a tokenized text: begin and end in the text, and id."""
    found, at = [], 0
    for token in tokens:
        if model.token_bytes(token):
            continue
        name = model.token_bytes(token, special=True).decode("utf-8", "replace")
        begin = text.find(name, at) if name else -1
        if begin >= 0:
            at = begin + len(name)
            found.append((begin, at, token))
    return found


def _encode_apart(model: Model, text: str, mask: bytes) -> list[int]:
    """Tokenize a text; only the characters that the template wrote can become control tokens."""
    tokens: list[int] = []
    at = 0

    def plain(end: int) -> None:
        if end > at:
            tokens.extend(model.tokenize(text[at:end], add_special=False, parse_special=False))

    for begin, end in _runs(mask):
        run = text[begin:end]
        for first, last, token in _controls(
            model, run, model.tokenize(run, add_special=False, parse_special=True)
        ):
            plain(begin + first)
            tokens.append(token)
            at = begin + last
    plain(len(text))
    return tokens


def _runs(mask: bytes) -> list[tuple[int, int]]:
    """Return begin and end of each run of characters that the template wrote."""
    runs, at = [], 0
    while (begin := mask.find(0, at)) >= 0:
        end = mask.find(1, begin)
        at = len(mask) if end < 0 else end
        runs.append((begin, at))
    return runs


def _cut(text: Marked, message: Message) -> Marked:
    """Return the text up to the end of the last message's content."""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str) and content:
        content = content[-1]["text"]
    if message.get("role") != "assistant" or not isinstance(content, str) or not content.strip():
        raise RequestError(
            "continue_final_message: the last message must be the assistant's and have content"
        )
    shown, needle = str.__str__(text), content.strip()
    at = shown.rfind(needle)
    while at >= 0 and 0 in mask_of(text)[at : at + len(needle)]:
        at = shown.rfind(needle, 0, at + len(needle) - 1)
    if at < 0:
        raise RequestError("continue_final_message: the template does not show the last message as it is")
    end = at + len(needle)
    spaces = content[len(content.rstrip()) :]
    return text[: end + len(spaces)] if shown.startswith(spaces, end) else text[:end]
