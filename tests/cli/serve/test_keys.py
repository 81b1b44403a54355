"""Keys from a file and from the environment; names that do not tell them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cortexmlx.cli.serve.keys import KEY_VARIABLE, load_secret, read_keys, secret_folder
from cortexmlx.errors import InvalidRequest
from support.patience import PATIENCE


def test_a_line_is_a_key_and_perhaps_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("\ufeff# a remark\n\n  one   Ann B # hers\ntwo\n#\n\tt#1\tTim\n", encoding="utf-8")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    keys = read_keys(path)
    assert list(keys) == ["one", "two", "t#1"] and "two" not in keys.pop("two")
    assert keys == {"one": "Ann B", "t#1": "Tim"}
    monkeypatch.setenv(KEY_VARIABLE, "three")
    assert list(read_keys(path)) == ["one", "two", "t#1", "three"] and list(read_keys(None)) == ["three"]
    monkeypatch.setenv(KEY_VARIABLE, "one")
    assert read_keys(path)["one"] == "Ann B"


def test_a_file_without_keys_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name, says in (("empty", "has no keys"), ("bytes", "cannot be read"), ("none", "cannot be read")):
        with pytest.raises(InvalidRequest, match=says):
            read_keys(tmp_path / name)
    assert read_keys(None) == {}


def path() -> Path:
    return secret_folder() / "secret"


def test_it_is_made_once_for_its_user_alone(capsys: pytest.CaptureFixture[str]) -> None:
    made = load_secret()
    assert len(made) == 32 and load_secret() == made == path().read_bytes()
    assert (path().stat().st_mode & 0o777, secret_folder().stat().st_mode & 0o777) == (0o600, 0o700)
    assert [each.name for each in secret_folder().iterdir()] == ["secret"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33, b"x" * 5000])
def test_a_damaged_one_is_made_anew_and_told(content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    before = load_secret()
    path().write_bytes(content)
    made = load_secret()
    assert made == load_secret() != before
    assert capsys.readouterr().err.count("it is new. Conversations with thoughts from before are refused.") == 1


def test_one_that_others_could_read_is_made_anew(capsys: pytest.CaptureFixture[str]) -> None:
    before = load_secret()
    path().chmod(0o644)
    assert load_secret() != before and path().stat().st_mode & 0o777 == 0o600
    assert "open to others" in capsys.readouterr().err


@pytest.mark.parametrize("broken", ["a file in the way", "a link", "a folder in its place"])
def test_one_that_cannot_be_kept_lasts_for_one_server(
    broken: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    secret_folder().parent.mkdir(parents=True)
    if broken == "a file in the way":
        secret_folder().write_text("")
    elif broken == "a link":
        (tmp_path / "elsewhere").write_bytes(b"x" * 32)
        secret_folder().mkdir()
        path().symlink_to(tmp_path / "elsewhere")
    else:
        path().mkdir(parents=True)
    one, other = load_secret(), load_secret()
    assert len(one) == 32 and one != other
    assert capsys.readouterr().err.count("cannot be kept in") == 2


def test_servers_that_start_together_have_the_same() -> None:
    """Also where a damaged one has to be made anew."""
    secret_folder().mkdir(parents=True, mode=0o700)
    path().write_bytes(b"half")
    code = "import sys; from cortexmlx.cli.serve.keys import load_secret; input(); print(load_secret().hex())"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        for process in started:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        said = {process.communicate(timeout=PATIENCE)[0].strip() for process in started}
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert said == {load_secret().hex()}
    assert os.listdir(secret_folder()) == ["secret"]
