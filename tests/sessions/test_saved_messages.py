"""Messages that others have written are read from a file, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import ConversationFileError
from cortexmlx.sessions.saved import parse_foreign_messages
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.cli_fakes import FakeEngine

SAID: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": "42", "tool_call_id": "1"},
]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(SAID),
        "\ufeff" + json.dumps([{**SAID[0], "role": "developer"}, *SAID[1:]]),
        json.dumps({"model": "gpt-4o", "temperature": 1, "messages": SAID}, indent=2),
        "\n".join(map(json.dumps, SAID)) + "\n\n",
        json.dumps({"messages": SAID}) + "\n",
        json.dumps({"messages": SAID, "format": "json"}),
        json.dumps([{"messages": SAID}]),
        "\n".join(map(json.dumps, [*SAID[:2]]))
        + "\n"
        + "\n".join(json.dumps({**m, "name": "a\u2028b"}, ensure_ascii=False) for m in SAID[2:]),
    ],
)
def test_messages_of_the_openai_api_are_loaded_in_every_form(text: str, tmp_path: Path) -> None:
    engine: Any = FakeEngine(EngineConfig("fake"))
    talk = engine.conversation(system="Old.", params=SamplingParams(top_k=3))
    talk.ask("old")
    (tmp_path / "talk.json").write_text(text)
    talk.load(tmp_path / "talk.json")
    assert talk.system == "Be brief." and talk.params.top_k == 3
    assert [(m["role"], m["content"]) for m in talk.messages] == [("user", "Hello"), ("assistant", ""), ("tool", "42")]
    assert talk.messages[1]["tool_calls"] == [{"id": "1", "function": {"name": "f", "arguments": {}}}]
    assert talk.messages[2]["tool_call_id"] == "1"


def test_a_line_may_have_what_python_takes_for_the_end_of_one() -> None:
    said = [{"role": "user", "content": "one\u2028two\x85three"}, {"role": "assistant", "content": "four"}]
    lines = "\r\n".join(json.dumps(message, ensure_ascii=False) for message in said)
    assert parse_foreign_messages(Path("talk.jsonl"), lines) == (None, tuple(said))


def test_one_message_on_a_line_is_a_conversation_of_one() -> None:
    said = {"role": "user", "content": "Hello"}
    assert parse_foreign_messages(Path("talk.jsonl"), json.dumps(said) + "\n") == (None, (said,))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[{"content": "hi"}]', "talk.json: message 1: `role` is None, but must be a text"),
        ('[{"role": "user", "content": "hi"}, "hello"]', "message 2: it is 'hello', but must be an object with `role`"),
        ('[{"role": "user", "content": 7}]', "message 1: `content` is 7, but must be a text"),
        ('[{"role": "user", "at": 5}]', "message 1: unknown field of a message: 'at'"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n' * 2, "has 2 conversations: keep one of them in a file"),
        ('{"role": "user"', "is not a saved conversation: it is no JSON, or torn"),
        ("{}", "is not a saved conversation: no JSON object with"),
        ("[]", "is not a saved conversation: no JSON object with"),
        ("", "is not a saved conversation: it is empty"),
        ('[{"messages": []}]', "is not a saved conversation"),
        ('[{"messages": 5}]', "is not a saved conversation: it is no JSON|no JSON object with"),
        ("1\n2\n", "message 1: it is 1, but must be an object"),
    ],
)
def test_what_cannot_be_read_is_refused_and_changes_nothing(text: str, says: str, tmp_path: Path) -> None:
    engine: Any = FakeEngine(EngineConfig("fake"))
    talk = engine.conversation(system="Old.")
    talk.ask("old")
    before = talk.messages
    (tmp_path / "talk.json").write_text(text)
    with pytest.raises(ConversationFileError, match=says):
        talk.load(tmp_path / "talk.json")
    assert (talk.system, talk.messages) == ("Old.", before)


def test_a_saved_conversation_is_no_list_of_messages(tmp_path: Path) -> None:
    engine: Any = FakeEngine(EngineConfig("fake"))
    talk = engine.conversation()
    talk.ask("one")
    talk.save(tmp_path / "talk.json")
    assert parse_foreign_messages(tmp_path, (tmp_path / "talk.json").read_text()) is None
