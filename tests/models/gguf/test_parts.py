"""A model in several files is the model in one; what is missing or does not belong is named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.errors import ModelCorrupt, ModelNotFound
from cortexmlx.models import load_model
from cortexmlx.models.gguf.file import read_model_header
from support.gguf.export import logits_of
from support.gguf.models import metadata, tensors, write_model
from support.gguf.writer import Uint32, write_gguf

Stored = dict[str, tuple[str, tuple[int, ...], bytes]]


def split(folder: Path, count: int = 3, **changes: Any) -> Path:
    """The tiny model in `count` files, the first of which holds metadata alone, as the splitting tool can do."""
    stored = tensors("Q8_0")
    names = list(stored)
    for number in range(count):
        part: Stored = {} if number == 0 else {name: stored[name] for name in names[number - 1 :: count - 1]}
        header: dict[str, Any] = metadata() if number == 0 else {}
        header |= {"split.no": Uint32(number), "split.count": Uint32(count), "split.tensors.count": len(stored)}
        write_gguf(folder / f"tiny-{number + 1:05}-of-{count:05}.gguf", header | changes, part)
    return folder / f"tiny-00001-of-{count:05}.gguf"


def test_all_parts_are_read_from_the_first(tmp_path: Path) -> None:
    whole = load_model(write_model(tmp_path / "whole.gguf", type_name="Q8_0"))
    assert np.array_equal(logits_of(load_model(split(tmp_path)).model), logits_of(whole.model))


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first = split(tmp_path)
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelNotFound, match=r"one of 3 parts.*tiny-00002-of-00003\.gguf is not beside"):
        read_model_header(first)


def test_a_later_part_names_the_first(tmp_path: Path) -> None:
    split(tmp_path)
    with pytest.raises(ModelNotFound, match=r"give tiny-00001-of-00003\.gguf"):
        load_model(tmp_path / "tiny-00002-of-00003.gguf")


def test_a_part_of_another_model_is_corrupt(tmp_path: Path) -> None:
    first = split(tmp_path)
    shutil.copy(tmp_path / "tiny-00002-of-00003.gguf", tmp_path / "tiny-00003-of-00003.gguf")
    with pytest.raises(ModelCorrupt, match=r"tiny-00003-of-00003\.gguf.*part 3 of 3"):
        read_model_header(first)


def test_a_part_that_was_renamed_says_what_the_names_are(tmp_path: Path) -> None:
    first = split(tmp_path)
    with pytest.raises(ModelCorrupt, match=r"-00001-of-00003\.gguf"):
        read_model_header(first.rename(tmp_path / "mine.gguf"))


def test_tensors_that_are_lost_between_the_parts_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ModelCorrupt, match=r"99 tensors, they hold 20"):
        read_model_header(split(tmp_path, **{"split.tensors.count": 99}))


def test_a_tensor_in_two_parts_is_corrupt(tmp_path: Path) -> None:
    first = split(tmp_path)
    stated = {"split.no": Uint32(2), "split.count": Uint32(3)}
    write_gguf(tmp_path / "tiny-00003-of-00003.gguf", stated, tensors("Q8_0"))
    with pytest.raises(ModelCorrupt, match="in two parts"):
        read_model_header(first)
