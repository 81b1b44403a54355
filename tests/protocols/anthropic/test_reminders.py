"""Reminders within a loop of calls: they end no loop, so a template goes on to write its thoughts, and what it wrote
before stays.
"""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.protocols.anthropic.conversation import read_conversation
from cortexmlx.protocols.openai.messages import read_messages
from cortexmlx.protocols.responses.offered import read_offered_tools
from cortexmlx.protocols.responses.reader import build_messages, read_items
from support.models.loop_templates import ALL, fitted

CALLS = 20
THINKING = ("qwen3", "qwen3.5", "glm", "minimax", "gpt-oss", "gemma4", "kimi")
REMINDED = (10, 20)
"""The calls after which there is a reminder, as Claude Code writes one."""


def loop(calls: int, way: str) -> list[Any]:
    """The messages of Anthropic's API after so many calls, with reminders in one of the ways of agents."""
    said: list[Any] = [{"role": "user", "content": "Find it."}]
    for n in range(1, calls + 1):
        thought = {"type": "thinking", "thinking": f"thought {n}.", "signature": ""}
        call = {"type": "tool_use", "id": f"toolu_{n}", "name": "read", "input": {"path": f"file {n}"}}
        said.append({"role": "assistant", "content": [thought, call]})
        blocks: list[Any] = [{"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": f"line {n}."}]
        text = {"type": "text", "text": f"reminder {n}."}
        reminded = n in REMINDED
        if reminded and way in ("beside", "before"):
            blocks.insert(1 if way == "beside" else 0, text)
        said.append({"role": "user", "content": blocks})
        if reminded and way in ("system", "user"):
            said.append({"role": way, "content": [text]})
    return said


def as_users(messages: list[Any]) -> list[Any]:
    """The messages with reminders as users' messages."""
    said: list[Any] = []
    for each in messages:
        content, _, rest = each["content"].partition("\n<user>\n")
        said.append({**each, "role": "user" if each["role"] == "system" else each["role"], "content": content})
        if rest:
            said.append({"role": "user", "content": rest.removesuffix("\n</user>")})
    return said


def lost(template: str, before: list[Any], after: list[Any]) -> tuple[int, int]:
    """How many characters of the earlier prompt are to be computed again, and how many thoughts the model reads."""
    one, other = fitted(template, *before, begin=False), fitted(template, *after, begin=False)
    common = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return len(one) - common, sum(f"thought {n}." in other for n in range(1, CALLS + 1))


@pytest.mark.parametrize("way", ["system", "beside", "before", "user"])
def test_a_reminder_of_an_agent_costs_no_loop(way: str) -> None:
    before = read_conversation({"messages": loop(CALLS - 1, way)}, None)
    after = read_conversation({"messages": loop(CALLS, way)}, None)
    for name, template in ALL.items():
        if name == "gemma2":  # knows no calls
            continue
        again, thoughts = lost(template, before, after)
        assert (again, thoughts) == (0, CALLS if name in THINKING else 0), name
        text = fitted(template, *after, begin=False)
        assert all(text.index(f"line {n}.") < text.index(f"reminder {n}.") for n in REMINDED), name
        if name in ("qwen3", "qwen3.5", "glm", "minimax", "gemma4"):
            again, thoughts = lost(template, before, as_users(after))
            whole = len(fitted(template, *before, begin=False))
            assert again > 0.7 * whole and not thoughts, "what it costs as a user's message"


def test_a_reminder_of_a_developer_costs_no_loop_and_a_question_ends_it() -> None:
    """In OpenAI's APIs a user's message after results may be a new question."""

    def asked(calls: int, role: str) -> tuple[list[Any], list[Any]]:
        chat: list[Any] = [{"role": "user", "content": "Find it."}]
        items: list[Any] = list(chat)
        for n in range(1, calls + 1):
            call, said = {"name": "read", "arguments": f'{{"path": "file {n}"}}'}, f"thought {n}."
            calling = [{"id": f"call_{n}", "type": "function", "function": call}]
            chat.append({"role": "assistant", "content": None, "reasoning_content": said, "tool_calls": calling})
            chat.append({"role": "tool", "tool_call_id": f"call_{n}", "content": f"line {n}."})
            items.append({"type": "reasoning", "content": [{"type": "reasoning_text", "text": said}]})
            items.append({"type": "function_call", "call_id": f"call_{n}", **call})
            items.append({"type": "function_call_output", "call_id": f"call_{n}", "output": f"line {n}."})
            if n in REMINDED:
                chat.append({"role": role, "content": f"reminder {n}."})
                items.append({"role": role, "content": f"reminder {n}."})
        told = build_messages(read_items(items, None), read_offered_tools({})[0], None)[0]
        return read_messages(chat), read_messages(told)

    for role, kept in (("developer", CALLS), ("system", CALLS), ("user", 0)):
        for before, after in zip(asked(CALLS - 1, role), asked(CALLS, role), strict=True):
            for name in THINKING[:-2]:
                again, thoughts = lost(ALL[name], before, after)
                if name == "gpt-oss":  # its loop ends with an answer
                    assert thoughts == CALLS and not again
                else:
                    assert thoughts == kept and (again == 0) == (kept > 0), (name, role)


def test_odd_places_of_reminders() -> None:
    def told(*blocks: Any, more: Any = ()) -> list[tuple[str, str]]:
        call = [{"type": "tool_use", "id": id, "name": "f", "input": {}} for id in ("1", "2")]
        said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": call}]
        read = read_conversation({"messages": [*said, {"role": "user", "content": list(blocks)}, *more]}, None)
        return [(each["role"], each["content"]) for each in read[2:]]

    def text(said: str) -> Any:
        return {"type": "text", "text": said}

    one, two = ({"type": "tool_result", "tool_use_id": id, "content": f"r{id}"} for id in ("1", "2"))
    empty = {**one, "content": []}
    system, user = ({"role": role, "content": [text("x")]} for role in ("system", "user"))
    assert told(one, text("a"), two, text("b"), text("c")) == [
        ("tool", "r1\n<user>\na\n</user>"),
        ("tool", "r2\n<user>\nb\nc\n</user>"),
    ]
    assert told(text("a"), one, two) == [("tool", "r1\n<user>\na\n</user>"), ("tool", "r2")]
    assert told(one, text(""), two) == [("tool", "r1"), ("tool", "r2")], "an empty text is nothing"
    assert told(empty, text("a")) == [("tool", "<user>\na\n</user>")]
    assert told(one, text("</user></tool_response><|im_end|>")) == [
        ("tool", "r1\n<user>\n</user></tool_response><|im_end|>\n</user>")
    ], "it is the client's own text"
    assert told(one, two, more=[system, user]) == [("tool", "r1"), ("tool", "r2\n<user>\nx\n</user>"), ("system", "x")]
    assert told(one, more=[{"role": "user", "content": [two]}, user])[1] == ("tool", "r2\n<user>\nx\n</user>")
    assert told(text("a"), text("b")) == [("user", "a\nb")], "there is no result"
    assert told(more=[system]) == [("user", ""), ("system", "x")]
