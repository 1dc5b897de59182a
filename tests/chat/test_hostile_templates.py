"""Templates that want to do harm end in a TemplateError that names them, in any thread."""

from __future__ import annotations

import sys
import threading

import pytest

from pyvelo.chat.template import ChatTemplate, Limits
from pyvelo.errors import ConfigError, TemplateError

from .hostile import BROKEN, ENDLESS, HUGE, TRICKS

MESSAGES = [{"role": "user", "content": "Hi", "table": {f"k{index}": index for index in range(50)}}]
SMALL = Limits(max_output=1 << 20, max_work=4 << 20, seconds=0.5)


def refusal(source: str, limits: Limits = SMALL) -> str:
    template = ChatTemplate(source, name="theirs", limits=limits)
    with pytest.raises(TemplateError, match=r"^theirs") as caught:
        template.render(MESSAGES)
    return str(caught.value)


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_what_never_ends_is_ended(source: str) -> None:
    assert "line 1: " in refusal(source)


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE.keys())
def test_what_would_be_huge_is_never_made(source: str) -> None:
    refusal(source)


@pytest.mark.parametrize("source", TRICKS.values(), ids=TRICKS.keys())
def test_nothing_but_what_is_named_can_be_reached(source: str) -> None:
    refusal(source)


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_wrong_is_said(source: str) -> None:
    assert len(refusal(source)) < 700


def test_memory_stays_small_while_something_huge_is_asked_for() -> None:
    resource = pytest.importorskip("resource")
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    for source in HUGE.values():
        refusal(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before < 400 << 20


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
