"""What has been said in a chat: pairs of question and answer, also from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.cli.conversation import Conversation
from cortexmlx.errors import InvalidRequest


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"system": 1, "messages": []}',
        '{"system": null, "messages": [{"role": "user", "content": "x"}]}',
        '{"system": null, "messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]}',
    ],
)
def test_a_file_that_is_no_conversation_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "talk.json").write_text(text)
    with pytest.raises(InvalidRequest, match="is not a saved conversation"):
        Conversation.load(tmp_path / "talk.json")


def test_turns_come_and_go_in_pairs() -> None:
    talk = Conversation("Be brief.")
    assert talk.undo() is None
    talk.add("one", "1")
    talk.add("two", "2")
    contents = [message["content"] for message in talk.messages("three")]
    assert contents == ["Be brief.", "one", "1", "two", "2", "three"]
    assert [message["role"] for message in talk.messages()] == ["system", *["user", "assistant"] * 2]
    assert talk.undo() == "two" and [turn["content"] for turn in talk.turns] == ["one", "1"]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.none() | TEXT, st.lists(st.tuples(TEXT, TEXT), max_size=4))
def test_what_was_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, system: str | None, turns: list[tuple[str, str]]
) -> None:
    talk = Conversation(system)
    for question, answer in turns:
        talk.add(question, answer)
    path = tmp_path_factory.getbasetemp() / "talk.json"
    talk.save(path)
    assert Conversation.load(path) == talk
