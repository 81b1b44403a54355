"""Where results go: the names of stdout, and descriptors that were given open."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortexmlx.cli.files.outputs import STDOUT, descriptor_of, is_regular, output_path


def test_stdout_has_several_names() -> None:
    assert output_path(None) == output_path(Path("-")) == output_path(Path("/dev/stdout")) == STDOUT
    assert output_path(Path("out")) == Path("out") and not is_regular(STDOUT)


@pytest.mark.parametrize(
    ("path", "descriptor"),
    [
        ("/dev/stdout", 1),
        ("/dev/stderr", 2),
        ("/dev/fd/63", 63),
        ("/proc/self/fd/7", 7),
        ("/dev/fd/x", None),
        ("/dev/shm/1", None),
        ("stdout", None),
    ],
)
def test_the_names_of_what_is_open_already(path: str, descriptor: int | None) -> None:
    assert descriptor_of(Path(path)) == descriptor
