"""Hostile templates end with a TemplateError that names them, in any thread."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import datetime

import pytest

from pyvelo.chat import meter
from pyvelo.chat.template import ChatTemplate, Limits
from pyvelo.errors import ConfigError, TemplateError

from .hostile import BROKEN, ENDLESS, ENDS, HUGE, LOOPS, TRICKS

MESSAGES = [{"role": "user", "content": "Hi", "table": {f"k{index}": index for index in range(50)}}]
SMALL = Limits(max_output=1 << 20, max_work=1 << 20, max_step=1 << 20, seconds=60)
TINY = Limits(max_output=1 << 20, max_work=1 << 18, seconds=60)


def refusal(source: str, limits: Limits = SMALL) -> str:
    template = ChatTemplate(source, name="theirs", limits=limits)
    with pytest.raises(TemplateError, match=r"^theirs") as caught:
        template.render(MESSAGES)
    return str(caught.value)


def peak_memory() -> int:
    """Return the most bytes of this process so far; 0 if the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_what_never_ends_is_ended(source: str) -> None:
    said = refusal(source, TINY)
    assert "line 1: " in said
    assert "seconds" not in said


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE.keys())
def test_what_would_be_huge_is_never_made(source: str) -> None:
    before = peak_memory()
    assert "seconds" not in refusal(source)
    assert peak_memory() - before < 100 << 20


@pytest.mark.parametrize("source", TRICKS.values(), ids=TRICKS.keys())
def test_nothing_but_what_is_named_can_be_reached(source: str) -> None:
    refusal(source)


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_wrong_is_said(source: str) -> None:
    assert len(refusal(source)) < 700


def test_the_time_limit_holds_in_a_thread() -> None:
    said: list[str] = []
    source = ENDLESS["nested loops"]
    limits = Limits(max_work=1 << 60, seconds=0.2)
    thread = threading.Thread(target=lambda: said.append(refusal(source, limits)))
    thread.start()
    thread.join(60)
    assert said == ["theirs, line 1: it takes longer than 0.2 seconds"]


def test_the_output_is_capped_while_it_is_written() -> None:
    source = "{% for i in range(1000) %}0123456789{% endfor %}"
    assert len(ChatTemplate(source, limits=Limits(max_output=10_000)).render(MESSAGES)) == 10_000
    limits = Limits(max_output=9_999)
    assert refusal(source, limits) == "theirs: its output is longer than 9999 characters"


def test_the_work_that_is_allowed_grows_with_the_messages() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content * 20 }}{% endfor %}", limits=Limits(max_work=5000)
    )
    text = "word " * 1000
    assert template.render([{"role": "user", "content": text}]) == text * 20
    with pytest.raises(TemplateError, match="more work"):
        ChatTemplate("{{ 'word ' * 1000 * 20 }}", limits=Limits(max_work=5000)).render(MESSAGES)


def test_a_source_that_is_none_or_too_long() -> None:
    assert refusal("x" * 70_000) == "theirs: of its 70000 characters at most 65536 can be read"
    with pytest.raises(ConfigError, match="not a bytes"):
        ChatTemplate(b"x")  # type: ignore[arg-type]


def test_an_error_names_the_line_also_inside_a_macro() -> None:
    source = "{% macro m() %}\n\n{{ 1 / 0 }}{% endmacro %}\n\n{{ m() }}"
    assert refusal(source) == "theirs, line 3: division by zero"
    assert refusal("\n\n{% for %}").startswith("theirs, line 3: ")
    assert refusal("\n{{ raise_exception('No ' ~ 'way') }}") == "theirs, line 2: No way"


def test_one_template_serves_many_threads() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(50):
            text = f"{number}/{turn}"
            if template.render([{"role": "user", "content": text}] * 3) != text * 3:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


BODY = "{{ a }}{% set b = a %}" * 50  # 250 nodes that are no work of the budget


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100) %}BODY{% endfor %}",
        "{% for i in range(100) %}{% set x %}BODY{% endset %}{% endfor %}",
        "{% for i in range(100) %}{% if i < 0 %}{% else %}BODY{% endif %}{% endfor %}",
        "{% macro m() %}BODY{% endmacro %}{% for i in range(100) %}{% set x = m() %}{% endfor %}",
        "{% macro m() %}{{ caller() }}{% endmacro %}"
        "{% for i in range(100) %}{% call m() %}BODY{% endcall %}{% endfor %}",
        "{% for i in range(100) recursive %}{% if i %}{{ loop([0]) }}{% endif %}BODY{% endfor %}",
        "{% for i in range(100) if LONG %}{% endfor %}",
        "{% for i in [[[]] * 99] if LONG recursive %}{{ loop(i) }}{% endfor %}",
    ],
    ids=lambda source: source[:60],
)
def test_the_clock_is_read_however_long_a_body_is(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    def monotonic() -> float:
        nonlocal reads
        reads += 1
        return time.monotonic()

    template = ChatTemplate(source.replace("BODY", BODY).replace("LONG", "a or " * 100 + "true"))
    template.render([{"role": "user", "content": "Hi"}])
    monkeypatch.setattr(meter, "time", type("Clock", (), {"monotonic": staticmethod(monotonic)}))
    template.render([{"role": "user", "content": "Hi"}])
    assert reads >= 4


@pytest.mark.parametrize(
    "source",
    [
        *("{{ 'x' * 9000 }}", "{{ messages[0].table }}", "{{ messages[0].table | tojson }}"),
        *("{{ '%s' % messages[0].table }}", "{{ messages[0].table | dictsort | string }}"),
        *("{{ messages[0].table == messages[0].table }}", "{{ range(400) | list | sort | first }}"),
        *("{{ ('x' * 999).replace('x', 'yyyy') }}", "{{ ('x' * 999 + 'y').find('xy' * 99) }}"),
    ],
)
def test_one_operation_takes_no_more_than_its_share(source: str) -> None:
    limits = Limits(max_step=1500)
    template = ChatTemplate(source, name="theirs", limits=limits)
    table = {f"k{index}": index for index in range(200)}
    messages = [{"role": "user", "content": "Hi", "table": {}}]
    short = source.replace("messages[0].table", f"dict({[[key, value] for key, value in table.items()]})")
    with pytest.raises(TemplateError, match="operation"):
        ChatTemplate(short, name="theirs", limits=limits).render(messages)
    assert template.render([{"role": "user", "content": "Hi " * 4000, "table": table}])


def test_a_format_of_many_values_takes_no_more_than_linear_time() -> None:
    source = "{{ '%s' * 300000 % ((1,) * 300000) }}"
    limits = Limits(max_work=1 << 30, max_step=1 << 30)
    assert ChatTemplate(source, limits=limits).render(MESSAGES) == "1" * 300_000


def test_names_for_a_content_are_found_in_linear_time() -> None:
    code = """
from pyvelo.chat.template import ChatTemplate
source = "".join("{%%set %x=%x%%}" % (n + 40960, n + 40959) for n in range(3600, 0, -1))
source += "{% set a000 = messages[0].content %}{% for part in ae10 %}{{ part.text }}{% endfor %}"
ChatTemplate("{% if false %}" + source + "{% endif %}").render([{"role": "user", "content": "Hi"}])
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_second_try_with_arguments_as_text_has_the_same_limits() -> None:
    tries: list[datetime] = []

    def now() -> datetime:
        tries.append(datetime(2026, 3, 4))
        return tries[-1]

    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    endless = "{{ strftime_now('%d') }}" + LOOPS + ENDS
    with pytest.raises(TemplateError, match="more work"):
        ChatTemplate(endless, limits=Limits(max_work=1 << 17), now=now).render(messages)
    assert len(tries) == 1
    long = "{{ 'x' * 90 }}{{ messages[0].tool_calls[0].function.arguments + 'x' }}"
    template = ChatTemplate(long, limits=Limits(max_output=150))
    assert template.render(messages) == "x" * 90 + '{"a": 1}x'
