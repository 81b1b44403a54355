"""What has been said in a chat: pairs of question and answer, also from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

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
