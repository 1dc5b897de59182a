"""Chat templates: programs in Jinja that render a conversation in the format of a model's training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
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
from pyvelo.lazy import lazy_property

if TYPE_CHECKING:
    from pyvelo.chat.sandbox import Sandbox

__all__ = ["BUILT_IN", "ChatTemplate", "Limits", "is_jinja"]

MAX_SOURCE = 64 << 10  # characters, bounds compile time; the longest published template has some 20,000
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
"""Templates by name, for models without a template."""


@dataclass(frozen=True)
class _Compiled:
    code: CodeType
    sandbox: Sandbox
    loops_over_content: bool
    knows_strings: bool


def is_jinja(source: str) -> bool:
    """Return whether a text has anything that Jinja replaces."""
    return "{%" in source or "{{" in source


class ChatTemplate:
    """A chat template in Jinja, from any source, compiled at its first use. Thread-safe.

    Args:
        source: the GGUF's `tokenizer.chat_template`.
        name: name in error messages.
        bos: text of the BOS token.
        eos: text of the EOS token.
        limits: bounds of a rendering.
        now: returns the time for templates that show it.

    Raises:
        ConfigError: the source is no string. Errors in it are raised by `render`, as TemplateError.
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

    def check(self) -> None:
        """Raise TemplateError if the source is wrong, or has nothing that Jinja replaces."""
        if not is_jinja(self.source):
            raise self._error(None, "it has no Jinja, so it shows no message")
        _ = self._compiled

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> str:
        """Return the conversation as text.

        Args:
            messages: dictionaries with role and content (a string, or parts of type text), and optionally
                tool_calls, tool_call_id, name and reasoning_content.
            tools: JSON schemas of functions.
            add_generation_prompt: write the beginning of the answer too.
            arguments: other variables of the template, such as enable_thinking=False.

        Raises:
            RequestError: a message is not valid.
            TemplateError: the template rejects the messages, is wrong, uses what it may not, or exceeds its
                limits.
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
        """Render as `render` does; characters from messages, tools and arguments are marked."""
        checked = self._suited(check_messages(messages))
        calls = any(message.get("tool_calls") for message in checked)
        names = {
            **{"tools": check_tools(tools), "documents": None},
            "add_generation_prompt": bool(add_generation_prompt),
            **check_arguments({} if arguments is None else arguments),
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
        """Return the messages with contents as this template reads them: as strings, or as parts only."""
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

    @lazy_property
    def _compiled(self) -> _Compiled:
        from jinja2 import TemplateSyntaxError  # here, so that only chats load it

        from pyvelo.chat.sandbox_functions import make_sandbox
        from pyvelo.chat.sandbox_syntax import looks_for

        if len(self.source) > MAX_SOURCE:
            raise self._error(None, f"of its {len(self.source)} characters at most {MAX_SOURCE} can be read")
        sandbox = make_sandbox(self._now)
        try:
            tree = sandbox.parse(self.source)
            loops, strings = looks_for(tree)
            return _Compiled(sandbox.code(tree, FILENAME), sandbox, loops, strings)
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
        template: Any = Template.from_code(sandbox, self._compiled.code, sandbox.globals)
        pieces: list[str] = []
        try:
            for piece in template.root_render_func(template.new_context(names)):
                meter.write(piece)
                pieces.append(piece)
        except (Refused, TemplateSays) as error:
            raise self._error(_line(error, template), str(error)) from None
        except Exception as error:  # a template can make Python raise anything
            raise self._error(_line(error, template), _sentence(error)) from None
        finally:
            sandbox.globals.clear()  # they refer to it, and the template's functions to themselves
            template.root_render_func.__globals__.clear()
        return merge(pieces)

    def _error(self, line: int | None, message: str) -> TemplateError:
        place = "" if line is None else f", line {line}"
        return TemplateError(f"{self.name}{place}: {message}")


def _line(error: BaseException, template: Any) -> int | None:
    """Return the line of the template that raised an error, the innermost if macros call each other."""
    trace, found = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILENAME:
            found = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return found


def _sentence(error: Exception) -> str:
    """Return an error's text as one line of limited length."""
    text = " ".join(str(error).split())[:500]
    match error:
        case RecursionError():
            return "it is nested too deep"
        case MemoryError():
            return "it takes more memory than there is"
        case KeyError():
            return f"there is no {text}"
    return text or type(error).__name__
