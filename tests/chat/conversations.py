"""Conversations that every template is tried with."""

from __future__ import annotations

from typing import Any

CALL_ID = "call12345"  # some templates want nine letters and digits

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city, now.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "Unit"},
                "days": {"type": "integer", "description": "Days ahead"},
            },
            "required": ["city"],
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "What time it is.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


def _call(arguments: Any) -> dict[str, Any]:
    return {
        "id": CALL_ID,
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }


USER = {"role": "user", "content": 'What is <b>new</b> & "old"?'}
ANSWER = {"role": "assistant", "content": "Nothing new in Zürich."}

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": [USER]},
    "turns": {
        "messages": [USER, ANSWER, {"role": "user", "content": "  Really?\nTell me more. 🦊 \n"}],
    },
    "system": {
        "messages": [
            {"role": "system", "content": "You are brief."},
            USER,
            ANSWER,
            {"role": "user", "content": "Why?"},
        ],
    },
    "no_prompt": {"messages": [USER, ANSWER], "add_generation_prompt": False},
    "reasoning": {
        "messages": [
            USER,
            {"role": "assistant", "reasoning_content": "I look around.", "content": "Nothing."},
            {"role": "user", "content": "And now?"},
        ],
    },
    "thinking_off": {"messages": [USER], "enable_thinking": False},
    "thinking_on": {"messages": [USER], "enable_thinking": True},
    "tools": {
        "messages": [{"role": "system", "content": "You are brief."}, USER],
        "tools": [WEATHER, CLOCK],
    },
    "tool_call": {
        "messages": [
            {"role": "user", "content": "How is the weather in Zürich?"},
            {"role": "assistant", "content": "", "tool_calls": [_call({"city": "Zürich", "days": 2})]},
            {"role": "tool", "tool_call_id": CALL_ID, "name": "get_weather", "content": '{"rain": true}'},
            {"role": "assistant", "content": "It rains."},
            {"role": "user", "content": "Thanks."},
        ],
        "tools": [WEATHER],
    },
    "tool_answer": {
        "messages": [
            {"role": "user", "content": "How is the weather in Zürich?"},
            {"role": "assistant", "content": "I ask.", "tool_calls": [_call({"city": "Zürich"})]},
            {"role": "tool", "tool_call_id": CALL_ID, "name": "get_weather", "content": "rain"},
        ],
        "tools": [WEATHER],
    },
}
