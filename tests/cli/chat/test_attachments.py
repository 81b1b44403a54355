"""Files in a message: which are read, which are refused, and what is no file."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortexmlx.cli.chat import attachments as files
from cortexmlx.cli.chat.attachments import prepend_files, read_attachment, read_mentions
from cortexmlx.cli.chat.session import AttachedFile
from cortexmlx.errors import InvalidRequest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "notes.txt").write_text("alpha\n")
    (tmp_path / "my file.py").write_text("\ufeffpass\n", "utf-8")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.c").write_text("```\n````\n")
    return tmp_path


@pytest.mark.parametrize(
    ("message", "names", "missing"),
    [
        ("@notes.txt what?", ["notes.txt"], []),
        ("what is (@notes.txt) about?", [], []),
        ("compare @src/main.c, @notes.txt.", ["src/main.c", "notes.txt"], []),
        ('@"my file.py" and @notes.txt @notes.txt', ["my file.py", "notes.txt"], []),
        ("@~/notes.txt", ["~/notes.txt"], []),
        ("line one\n@src/main.c", ["src/main.c"], []),
        ("me@notes.txt, @someone and @property", [], []),
        ("@src/gone.c @nobody/x @src", [], ["src/gone.c", "nobody/x"]),
        ("@ @@ @\0", [], []),
    ],
)
def test_mentioned_files_are_found(here: Path, message: str, names: list[str], missing: list[str]) -> None:
    found, gone = read_mentions(message)
    assert [each.path for each in found] == [Path(name).expanduser() for name in names]
    assert gone == missing


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.bin", b"a\0b", "is a binary file, and only text can be read"),
        ("a.pdf", b"%PDF-1.7 ...", "is a PDF"),
        ("a.docx", b"PK\x03\x04...", "is an archive or an office document"),
        ("a.txt", "né".encode("latin-1"), "is no UTF-8 text: byte 1 is 0xe9. Convert it"),
        ("a.txt", b" \n", "is empty"),
        ("a.txt", b"x" * 101, "has 101 B, and 100 B of a file are read"),
    ],
)
def test_what_is_no_text_or_too_much_is_refused(
    here: Path, name: str, data: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 100)
    (here / name).write_bytes(data)
    for read in (read_attachment, lambda each: read_mentions(f"@{each}")):
        with pytest.raises(InvalidRequest, match=says):
            read(name)


def test_what_is_not_there_is_refused(here: Path) -> None:
    for name, says in {
        "gone": "is not there",
        "src": "is a folder",
        "/dev/null": "is no file",
        "x" * 300: "read",
    }.items():
        with pytest.raises(InvalidRequest, match=says):
            read_attachment(name)
    assert read_attachment(" 'my file.py' ") == AttachedFile(Path("my file.py"), "pass\n"), (
        "without its byte order mark"
    )


def test_a_fence_is_longer_than_those_in_the_file(here: Path) -> None:
    text = prepend_files([read_attachment("src/main.c"), read_attachment("notes.txt")], "What?")
    assert text == "src/main.c:\n`````c\n```\n````\n`````\n\nnotes.txt:\n```txt\nalpha\n```\n\nWhat?"
