"""Times are forgotten when what they are times of changes."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import pytest

import cortexmlx.metal
from cortexmlx.attention import autotuning
from cortexmlx.attention.autotuning import kernel_digest


@pytest.mark.parametrize("file", ["shaders/paged_decode.metal", "shaders/paged_attention.h", "vector.py", "rules.py"])
def test_a_text_that_changes_changes_the_digest(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = Path(cortexmlx.metal.__path__[0])
    copy = tmp_path / "metal"
    copytree(room, copy, ignore=lambda folder, names: [n for n in names if n == "__pycache__" or n == "sim"])
    monkeypatch.setattr(autotuning, "files", lambda package: copy)
    before = kernel_digest()
    text = (copy / file).read_text()
    (copy / file).write_text(text + " ")
    assert kernel_digest() != before
    (copy / file).write_text(text)
    assert kernel_digest() == before
