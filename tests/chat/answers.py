"""Answers of models in the formats of their chat templates, with the parts that they have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

INTEGER = {"type": "integer"}
TEXT = {"type": "string"}


def function(name: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """Return the description of a function."""
    schema = {"type": "object", "properties": properties, "required": [*required]}
    described = {"name": name, "description": f"Does {name}.", "parameters": schema}
    return {"type": "function", "function": described}


TOOLS = [
    function("add", ("a", "b"), a=INTEGER, b=INTEGER),
    function("weather", ("city",), city=TEXT, days=INTEGER),
    function(
        "save",
        ("note",),
        note={"type": "object", "properties": {"title": TEXT, "tags": {"type": "array", "items": {}}}},
    ),
    function("now"),
]
HELLO = "Hello there!\nHow are you?"


@dataclass(frozen=True)
class Answer:
    """Text of a model, and its parts; calls: pairs of name and arguments."""

    template: str
    text: str
    content: str = ""
    reasoning: str | None = None
    calls: tuple[tuple[str, Any], ...] = ()
    ids: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


ADD = ("add", {"a": 12, "b": 30})
PARIS = ("weather", {"city": 'Paris, "the" café\\\n', "days": 2})
PARIS_JSON = '{"city": "Paris, \\"the\\" café\\\\\\n", "days": 2}'
NOTE = ("save", {"note": {"title": "a}]b", "tags": ["x", "<y>", {"z": [1.5, None, True]}]}})
NOTE_JSON = '{"note": {"title": "a}]b", "tags": ["x", "<y>", {"z": [1.5, null, true]}]}}'
QWEN = "Qwen-Qwen2.5-7B-Instruct"
OSS = "openai-gpt-oss-120b"
SMALL = "Mistral-Small-3.2-24B-Instruct-2506"
KIMI = "Kimi-K2-Thinking"
R7B = "CohereForAI-c4ai-command-r7b-12-2024-tool_use"
V31 = "deepseek-ai-DeepSeek-V3.1"

ANSWERS = (
    Answer(QWEN, HELLO, HELLO),
    Answer(QWEN, hermes("add", '{"a": 12, "b": 30}'), calls=(ADD,)),
    Answer(QWEN, "I look." + hermes("weather", PARIS_JSON), "I look.", calls=(PARIS,)),
    Answer(QWEN, hermes("weather", PARIS_JSON) + "\n" + hermes("save", NOTE_JSON), calls=(PARIS, NOTE)),
    Answer("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", hermes("save", NOTE_JSON), calls=(NOTE,)),
    Answer("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", hermes("weather", PARIS_JSON), calls=(PARIS,)),
    Answer("ibm-granite-granite-4.0", hermes("add", '{"a": 12, "b": 30}'), calls=(ADD,)),
    Answer("Qwen-Qwen3-0.6B", "<think>\nHm, 12 < 30.\n</think>\n\n" + HELLO, HELLO, "Hm, 12 < 30."),
    Answer(
        "Qwen-Qwen3-0.6B",
        "<think>\nLet me [see].\n</think>\n\n" + hermes("add", '{"a": 12, "b": 30}'),
        reasoning="Let me [see].",
        calls=(ADD,),
    ),
    Answer(
        "Qwen-QwQ-32B",
        "I think.\n</think>\n\n" + HELLO,
        HELLO,
        "I think.",
        arguments={"enable_thinking": True},
    ),
    Answer("Qwen3-Coder", coder("add", a="12", b="30"), calls=(ADD,)),
    Answer(
        "Qwen3-Coder",
        "Look:\n" + coder("weather", city='Rome "<b>" {x}', days="3"),
        "Look:\n",
        calls=(("weather", {"city": 'Rome "<b>" {x}', "days": 3}),),
    ),
    Answer("Qwen3.5-4B", "Hm.\n</think>\n\n" + coder("now"), reasoning="Hm.", calls=(("now", {}),)),
    Answer("meta-llama-Llama-3.1-8B-Instruct", HELLO, HELLO),
    Answer(
        "meta-llama-Llama-3.2-3B-Instruct", '{"name": "add", "parameters": {"a": 12, "b": 30}}', calls=(ADD,)
    ),
    Answer("meta-llama-Llama-3.3-70B-Instruct", HELLO, HELLO),
    Answer(
        "mistralai-Mistral-Nemo-Instruct-2407",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 12, "b": 30}, "id": "123456789"}]',
        calls=(ADD,),
    ),
    Answer(
        SMALL, '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 12, "b": 30}', calls=(ADD,), ids=("123456789",)
    ),
    Answer(
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "[THINK]So\nwhat[/THINK]" + "[TOOL_CALLS]save[ARGS]" + NOTE_JSON,
        reasoning="So\nwhat",
        calls=(NOTE,),
    ),
    Answer(V31, "Hm.</think>" + HELLO, HELLO, "Hm.", arguments={"thinking": True}),
    Answer(
        V31,
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>weather<\uff5ctool\u2581sep\uff5c>"
        + PARIS_JSON
        + "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
        calls=(PARIS,),
        arguments={"enable_thinking": False, "thinking": False},
    ),
    Answer("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "I\nthink</think>" + HELLO, HELLO, "I\nthink"),
    Answer(OSS, "<|channel|>final<|message|>" + HELLO, HELLO),
    Answer(
        OSS,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>" + HELLO,
        HELLO,
        "Hm.",
    ),
    Answer(
        OSS,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + PARIS_JSON,
        reasoning="Hm.",
        calls=(PARIS,),
    ),
    Answer("meetkai-functionary-medium-v3.1", '<function=add>{"a": 12, "b": 30}</function>', calls=(ADD,)),
    Answer("meetkai-functionary-medium-v3.2", "all\n" + HELLO, HELLO),
    Answer("meetkai-functionary-medium-v3.2", 'add\n{"a": 12, "b": 30}', calls=(ADD,)),
    Answer(
        R7B,
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>" + HELLO + "<|END_RESPONSE|>",
        HELLO,
        "Hm.",
    ),
    Answer(
        R7B,
        '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n  {"tool_call_id": "0", "tool_name": "add", '
        '"parameters": {"a": 12, "b": 30}}\n]<|END_ACTION|>',
        reasoning="Hm.",
        calls=(ADD,),
        ids=("0",),
    ),
    Answer(
        "fireworks-ai-llama-3-firefunction-v2",
        ' functools[{"name": "add", "arguments": {"a": 12, "b": 30}}]',
        calls=(ADD,),
    ),
    Answer(
        "GLM-4.6",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        calls=(("weather", {"city": "Rome"}),),
    ),
    Answer(
        KIMI,
        "<think>Hm.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        '<|tool_call_argument_begin|>{"a": 12, "b": 30}<|tool_call_end|><|tool_calls_section_end|>',
        reasoning="Hm.",
        calls=(ADD,),
        ids=("functions.add:0",),
    ),
    Answer(
        "Apertus-8B-Instruct", '<|tools_prefix|>[{"add": {"a": 12, "b": 30}}]<|tools_suffix|>', calls=(ADD,)
    ),
    Answer("google-gemma-2-2b-it", HELLO, HELLO),
    Answer("microsoft-Phi-3.5-mini-instruct", HELLO, HELLO),
)
