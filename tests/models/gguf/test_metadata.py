"""Look-ups in a header's metadata: the value, its default, or one error that names the key and what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortexmlx.errors import CortexError, ModelCorrupt, ModelUnsupported
from cortexmlx.models.gguf.file import GGUFHeader, GGUFMetadata


def meta(**values: Any) -> GGUFMetadata:
    named = {f"llama.{key}": value for key, value in values.items()}
    return GGUFMetadata(GGUFHeader(Path("a.gguf"), {"general.architecture": "llama", **named}, {}))


def test_values_are_found_and_defaults_stand_for_what_is_not_stated() -> None:
    found = meta(count=3, ratio=0.5, whole=2, name="x", on=True, many=[1, 2])
    assert (found.arch_integer("count"), found.arch_integer("other", 7)) == (3, 7)
    assert (found.arch_number("ratio"), found.arch_number("whole"), found.arch_number("other", 1.5)) == (0.5, 2.0, 1.5)
    assert (found.text("llama.name"), found.text("llama.other", "y")) == ("x", "y")
    assert (found.flag("llama.on", False), found.flag("llama.other", True)) == (True, True)
    assert (found.items("llama.many", int), found.items("llama.other", str)) == ([1, 2], [])
    assert found.arch_has("count") and not found.arch_has("other")


@pytest.mark.parametrize(
    ("value", "look_up", "error", "words"),
    [
        (None, "arch_integer", ModelCorrupt, "lacks"),
        (None, "arch_number", ModelCorrupt, "lacks"),
        (True, "arch_integer", ModelCorrupt, "True"),
        (0, "arch_integer", ModelCorrupt, "0"),
        (1 << 31, "arch_integer", ModelCorrupt, str(1 << 31)),
        (2.5, "arch_integer", ModelCorrupt, "2.5"),
        ([1, 2, 3], "arch_integer", ModelUnsupported, "layer to layer"),
        (float("nan"), "arch_number", ModelCorrupt, "nan"),
        (float("inf"), "arch_number", ModelCorrupt, "inf"),
        ("x", "arch_number", ModelCorrupt, "'x'"),
        ([1.0] * 9, "arch_number", ModelCorrupt, "a list of 9"),
    ],
)
def test_what_is_missing_or_of_another_kind_is_named(
    value: Any, look_up: str, error: type[CortexError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        getattr(meta(**({} if value is None else {"key": value})), look_up)("key")
    assert "a.gguf" in str(caught.value) and "'llama.key'" in str(caught.value)


def test_a_list_of_the_wrong_kind_is_not_a_text() -> None:
    with pytest.raises(ModelCorrupt, match="a list of 2"):
        meta(key=[1, 2]).items("llama.key", str)
    with pytest.raises(ModelCorrupt, match="a text"):
        meta(key=3).text("llama.key")
    with pytest.raises(ModelCorrupt, match="true or false"):
        meta(key=1).flag("llama.key", True)
