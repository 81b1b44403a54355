"""Times are forgotten when what they are times of changes."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import mlx.core as mx
import pytest

import cortexmlx.metal
from cortexmlx.attention import choices as identity
from cortexmlx.attention.choices import identity_here, kernel_digest


def test_the_identity_names_machine_and_versions() -> None:
    here = identity_here()
    assert here == identity_here() and here.mlx == mx.__version__ and here.device and here.system
    assert here.texts == kernel_digest()


@pytest.mark.parametrize("file", ["shaders/paged_decode.metal", "shaders/paged_attention.h", "vector.py", "rules.py"])
def test_a_text_that_changes_changes_the_digest(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = Path(cortexmlx.metal.__path__[0])
    copy = tmp_path / "metal"
    copytree(room, copy, ignore=lambda folder, names: [n for n in names if n == "__pycache__" or n == "sim"])
    monkeypatch.setattr(identity, "files", lambda package: copy)
    before = kernel_digest()
    text = (copy / file).read_text()
    (copy / file).write_text(text + " ")
    assert kernel_digest() != before
    (copy / file).write_text(text)
    assert kernel_digest() == before


def test_a_gpu_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(identity, "metal_device", lambda: "Apple M4 Max")
    assert identity_here().device == "Apple M4 Max"
