"""A file is written as a whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cortexmlx.system.files import write_atomically


def write(path: Path, text: str, **options: bool) -> None:
    with write_atomically(path, **options) as file:  # type: ignore[arg-type]
        file.write(text.encode())


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_what_was_there_stays_until_the_new_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with write_atomically(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old" and len(os.listdir(tmp_path)) == 2
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a"]


def test_a_new_file_has_the_usual_mode_another_keeps_its_own_and_a_private_one_is_private(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write(tmp_path / "new", "x")
        write(tmp_path / "private", "x", private=True)
        (tmp_path / "kept").touch()
        (tmp_path / "kept").chmod(0o640)
        write(tmp_path / "kept", "x")
        (tmp_path / "was").touch(0o644)
        write(tmp_path / "was", "x", private=True)
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("new", "private", "kept", "was")] == [0o644, 0o600, 0o640, 0o600]


def test_a_link_stays_one_to_a_file_that_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name, target in (("link", "there/a"), ("second", "link")):
        (tmp_path / name).symlink_to(tmp_path / target)
    write(tmp_path / "second", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "second").is_symlink()
    assert (tmp_path / "there" / "a").read_text() == "new" and os.listdir(tmp_path / "there") == ["a"]
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="symbolic links"):
        write(tmp_path / "loop", "x")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_whatever_fails_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise error

    with pytest.raises(type(error)), write_atomically(path) as file:
        file.write(b"half")
        fail()
    for name in ("fsync", "fchmod"):
        with monkeypatch.context() as patched, pytest.raises(type(error)):
            patched.setattr(os, name, fail)
            write(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: what is held back is refused when the file is closed, too."""
    path = tmp_path / "a"
    path.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write(path, "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(OSError, match="it is no file"):
            write(tmp_path / name, "x")
    assert os.listdir(tmp_path) == ["pipe"]


def test_what_a_process_left_that_died_is_written_over(tmp_path: Path) -> None:
    path, beside = tmp_path / "a", tmp_path / "a.new"
    died = "import os, sys; from pathlib import Path; from cortexmlx.system.files import write_atomically\n"
    died += "with write_atomically(Path(sys.argv[1]), temp_path=Path(sys.argv[2])): os._exit(9)"
    assert subprocess.run([sys.executable, "-c", died, str(path), str(beside)], check=False).returncode == 9
    assert os.listdir(tmp_path) == ["a.new"]
    with write_atomically(path, temp_path=beside) as file:
        file.write(b"new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("theirs")
    beside.symlink_to(elsewhere)
    with write_atomically(path, temp_path=beside) as file:
        file.write(b"newer")
    assert elsewhere.read_text() == "theirs", "a link that lies there is not followed"
