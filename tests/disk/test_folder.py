"""The folder of a store, and the secret that all who share it have."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cortexmlx.disk.folder import SECRET, open_folder


def test_a_new_folder_and_its_secret_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        secret = open_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "b" / SECRET).stat().st_mode & 0o777 == 0o600
    assert len(secret) == 32 and open_folder(tmp_path / "a" / "b") == secret
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [SECRET]


def test_a_folder_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    open_folder(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_those_who_come_at_once_have_one_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: open_folder(tmp_path / "new"), range(64)))) == 1


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 33])
def test_a_damaged_secret_is_replaced(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / SECRET).write_bytes(damage)
    (tmp_path / SECRET).chmod(0o600)
    assert len(open_folder(tmp_path)) == 32


def test_a_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        open_folder(tmp_path / "file")


def test_a_secret_of_somebody_else_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who knows it can write files that pass for ours."""
    open_folder(tmp_path)
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to user"):
        open_folder(tmp_path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o777])
def test_a_secret_that_others_could_read_is_made_anew(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    """They may know it for ever. All who share the folder have the new one."""
    old = open_folder(tmp_path)
    (tmp_path / SECRET).chmod(mode)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: open_folder(tmp_path), range(8)))
    new = open_folder(tmp_path)
    assert new != old and open_folder(tmp_path) == new
    assert (tmp_path / SECRET).stat().st_mode & 0o777 == 0o600
    assert "others could read" in caplog.records[0].getMessage()


def test_a_file_system_without_modes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There every secret would be replaced, and nothing ever found."""
    monkeypatch.setattr("cortexmlx.disk.folder._OTHERS", 0o600)
    with pytest.raises(OSError, match="use a folder on a file system that keeps modes"):
        open_folder(tmp_path)


def test_a_folder_in_the_place_of_the_secret_is_an_error(tmp_path: Path) -> None:
    (tmp_path / SECRET).mkdir()
    with pytest.raises(OSError, match="no file"):
        open_folder(tmp_path)


def test_nobody_waits_for_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SECRET)
    with pytest.raises(OSError, match="no file"):
        open_folder(tmp_path)
    (tmp_path / SECRET).unlink()
    (tmp_path / SECRET).symlink_to("/dev/zero")
    with pytest.raises(OSError, match="symbolic link"):
        open_folder(tmp_path)


@pytest.mark.parametrize("name", [SECRET, "index.sqlite"])
def test_files_of_others_are_left_alone(tmp_path: Path, name: str) -> None:
    """Whoever names the folder of another program loses nothing there."""
    (tmp_path / name).write_text("what another program keeps here")
    (tmp_path / "app.toml").write_text("")
    with pytest.raises(OSError, match=f"such as app.toml, and {name} may be theirs"):
        open_folder(tmp_path)
    assert (tmp_path / name).read_text() == "what another program keeps here"
    (tmp_path / name).unlink()
    assert len(open_folder(tmp_path)) == 32
