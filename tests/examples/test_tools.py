"""The notes: what a model may read and write, and that it stays in the folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.cli.chat.tools.functions_file import load_tools
from cortexmlx.structured.functions import call_function
from support.examples import EXAMPLES, example
from support.models.calling import write_calling
from support.models.thinking import dictated
from support.patience import PATIENCE


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "garden.txt").write_text("Peas on Monday.")
    (tmp_path / "secret.txt").write_text("secret")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return example("tools/notes.py")


def test_its_functions_read_and_write_in_the_folder_only(notes: Any, tmp_path: Path) -> None:
    assert [tool.name for tool in load_tools(EXAMPLES / "tools" / "notes.py")] == [
        "list_notes",
        "read_note",
        "add_note",
    ]
    assert call_function(notes.list_notes, "{}") == '["garden"]'
    assert call_function(notes.read_note, '{"name": "garden"}') == "Peas on Monday."
    assert call_function(notes.add_note, '{"name": "new", "text": "é"}') == "new is written"
    assert (tmp_path / "notes" / "new.txt").read_text() == "é"
    assert call_function(notes.add_note, '{"name": "garden", "text": ""}').startswith("Error: FileExistsError")
    for name in ("../secret", str(tmp_path / "secret"), "a/b", "../../x"):
        assert call_function(notes.read_note, json.dumps({"name": name})).startswith("Error: ")
        assert call_function(notes.add_note, json.dumps({"name": name, "text": "x"})).startswith("Error: ")


def test_the_program_asks_before_it_writes(
    notes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [
        '{"name": "list_notes", "arguments": {}}',
        '{"name": "add_note", "arguments": {"name": "a", "text": "b"}}',
        '{"name": "add_note", "arguments": {"name": "c", "text": "d"}}',
    ]
    model = write_calling(tmp_path / "model", "hermes")
    real = notes.Engine

    def engine(name: str) -> Any:
        opened = real(name, kv_memory="8MB")
        texts = ["\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls), "Done."]
        params = dictated(opened, *texts)
        begin = opened.conversation
        opened.conversation = lambda **options: begin(**options, params=params)
        return opened

    monkeypatch.setattr(notes, "Engine", engine)
    answers = iter(["y", "n"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    monkeypatch.setattr(sys, "argv", ["notes.py", str(model), "Hello?"])
    notes._main()
    said = capsys.readouterr().out
    assert said.endswith("Done.\n") and "[list_notes {}]" in said and "did not allow" in said
    assert sorted(path.name for path in (tmp_path / "notes").iterdir()) == ["a.txt", "garden.txt"]
    monkeypatch.setattr(sys, "argv", ["notes.py", "/missing", "Hello?"])
    with pytest.raises(SystemExit, match="error: "):
        notes._main()


def test_an_example_ends_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "tools" / "notes.py"), "no/such/model", "what?"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=PATIENCE,
        env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(EXAMPLES.parent), "HOME": str(tmp_path)},
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
