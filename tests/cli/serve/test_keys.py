"""Keys from a file and from the environment; names that do not tell them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortexmlx.cli.serve.keys import KEY, keys_in
from cortexmlx.errors import InvalidRequest


def test_a_line_is_a_key_and_perhaps_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("# a remark\n\n  one   Ann B # hers\ntwo\n")
    monkeypatch.delenv(KEY, raising=False)
    keys = keys_in(path)
    assert list(keys) == ["one", "two"] and keys["one"] == "Ann B" and "two" not in keys["two"]
    monkeypatch.setenv(KEY, "three")
    assert list(keys_in(path)) == ["one", "two", "three"] and list(keys_in(None)) == ["three"]
    monkeypatch.setenv(KEY, "one")
    assert keys_in(path)["one"] == "Ann B"


def test_a_file_without_keys_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name, says in (("empty", "has no keys"), ("bytes", "cannot be read"), ("none", "cannot be read")):
        with pytest.raises(InvalidRequest, match=says):
            keys_in(tmp_path / name)
    assert keys_in(None) == {}
