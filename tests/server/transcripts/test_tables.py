"""Each model has a table of its own, on disk if there is a folder that can be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortexmlx.server.transcripts import Remembered, RememberedAnswer, TranscriptTables
from cortexmlx.sessions.turn import Transcript

ONE = Remembered(Transcript("a", (1,), ((0, 0), (1, 1))), 1, RememberedAnswer("b", "", (), "b", (2,), "$"))


def test_each_model_has_its_own() -> None:
    tables = TranscriptTables(1 << 20)
    table = tables.of("one")
    assert table is not None and table is tables.of("one") and table is not tables.of("another")
    assert TranscriptTables(0).of("one") is None


def test_a_folder_that_cannot_be_used_is_told_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    table = TranscriptTables(1 << 20, tmp_path / "file").of("one")
    assert table is not None and "not kept on disk" in caplog.text
    table.keep("key", ONE)
    assert table.all() == [("key", ONE)]
