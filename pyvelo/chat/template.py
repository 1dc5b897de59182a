"""Chat templates: a conversation as the text that a model was trained to go on with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from types import CodeType
from typing import TYPE_CHECKING, Any

from pyvelo.chat.marked import Marked, merge
from pyvelo.chat.messages import (
    Message,
    as_text_arguments,
    check_arguments,
    check_messages,
    check_tools,
    join_parts,
)
from pyvelo.chat.meter import Limits, Meter, Refused
from pyvelo.chat.plain import Parts, units
from pyvelo.errors import ConfigError, TemplateError

if TYPE_CHECKING:
    from pyvelo.chat.sandbox import Sandbox

__all__ = ["BUILT_IN", "ChatTemplate", "Limits"]

MAX_SOURCE = 64 << 10  # characters: what bounds compiling; the longest that is published has some 20,000
FILENAME = "<chat template>"

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ (call.function or call) | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

BUILT_IN: Mapping[str, str] = {"chatml": CHATML}
"""Templates by name, for models that bring none."""


@dataclass(frozen=True)
class _Compiled:
    code: CodeType
    sandbox: Sandbox
    loops_over_content: bool
    knows_strings: bool


class ChatTemplate:
    """A chat template in Jinja, which may come from anybody; it is compiled when it is first used.

    source: what the GGUF has as `tokenizer.chat_template`.
    name: what errors call it.
    bos, eos: text of the model's first and last token.
    limits: bounds of a rendering.
    now: tells the time to templates that ask for it.

    Thread-safe. Raises ConfigError for a source that is no string; what is wrong in it shows, as
    TemplateError, when it is rendered.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "chat template",
        bos: str = "",
        eos: str = "",
        limits: Limits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if not isinstance(source, str):
            raise ConfigError(f"a chat template is a string of Jinja, not a {type(source).__name__}")
        self.source = source
        self.name = name
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._limits = limits or Limits()
        self._now = now

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> str:
        """The conversation as text.

        messages: dictionaries with role and content (a string, or parts of type text), and tool_calls,
            tool_call_id, name, reasoning_content where there are some.
        tools: descriptions of functions, as JSON schemas.
        add_generation_prompt: whether the answer's beginning is written too.
        arguments: whatever else the template knows, such as enable_thinking=False.

        Raises RequestError for messages that are none, TemplateError where the template refuses them, is
        wrong, reaches for what it may not, or takes more than its limits.
        """
        return str.__str__(
            self.render_marked(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, arguments=arguments
            )
        )

    def render_marked(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> Marked:
        """As `render`; the text says which characters came from messages, tools and arguments."""
        checked = self._suited(check_messages(messages))
        calls = any(message.get("tool_calls") for message in checked)
        names = {
            **{"tools": check_tools(tools), "documents": None},
            "add_generation_prompt": bool(add_generation_prompt),
            **check_arguments(arguments or {}),
            **self._tokens,
        }
        meter = self._meter({**names, "messages": checked})
        try:
            return self._run({**names, "messages": checked}, meter)
        except TemplateError as error:
            if not calls:
                raise
            try:  # templates differ in how they want the arguments of a call
                checked = as_text_arguments(self._suited(check_messages(messages)))
                meter.retry()
                return self._run({**names, "messages": checked}, meter)
            except TemplateError:
                raise error from None

    def _suited(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Contents as this template takes them: strings, or parts where it looks for parts alone."""
        compiled = self._compiled
        if not compiled.loops_over_content:
            return join_parts(messages)
        if compiled.knows_strings:
            return messages
        return [
            {**message, "content": Parts([{"type": "text", "text": message["content"]}])}
            if isinstance(message.get("content"), str)
            else message
            for message in messages
        ]

    @cached_property
    def _compiled(self) -> _Compiled:
        from jinja2 import TemplateSyntaxError  # here, so that only who chats loads it

        from pyvelo.chat.sandbox_functions import make_sandbox
        from pyvelo.chat.sandbox_syntax import looks_for

        if len(self.source) > MAX_SOURCE:
            raise self._error(None, f"of its {len(self.source)} characters at most {MAX_SOURCE} can be read")
        sandbox = make_sandbox(self._now)
        try:
            loops, strings = looks_for(sandbox.parse(self.source))
            return _Compiled(sandbox.code(self.source, FILENAME), sandbox, loops, strings)
        except TemplateSyntaxError as error:
            raise self._error(error.lineno, error.message or "it is no Jinja") from None
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            raise self._error(None, f"it cannot be compiled ({_sentence(error)})") from None

    def _meter(self, names: dict[str, Any]) -> Meter:
        from jinja2.runtime import Undefined

        return Meter(self._limits, units(names), (Undefined,))

    def _run(self, names: dict[str, Any], meter: Meter) -> Marked:
        from jinja2 import Template

        from pyvelo.chat.sandbox_functions import TemplateSays

        sandbox = self._compiled.sandbox.metered_by(meter)
        template = Template.from_code(sandbox, self._compiled.code, sandbox.globals)
        pieces: list[str] = []
        try:
            for piece in template.root_render_func(template.new_context(names)):
                meter.write(piece)
                pieces.append(piece)
        except (Refused, TemplateSays) as error:
            raise self._error(_line(error, template), str(error)) from None
        except Exception as error:  # a template can make Python raise anything
            raise self._error(_line(error, template), _sentence(error)) from None
        return merge(pieces)

    def _error(self, line: int | None, message: str) -> TemplateError:
        place = "" if line is None else f", line {line}"
        return TemplateError(f"{self.name}{place}: {message}")


def _line(error: BaseException, template: Any) -> int | None:
    """The line of the template at which an error was raised, the innermost where macros call each other."""
    trace, found = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILENAME:
            found = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return found


def _sentence(error: Exception) -> str:
    """What Python says of an error, in a line of reasonable length."""
    text = " ".join(str(error).split())[:500]
    match error:
        case RecursionError():
            return "it is nested too deep"
        case MemoryError():
            return "it takes more memory than there is"
        case KeyError():
            return f"there is no {text}"
    return text or type(error).__name__
