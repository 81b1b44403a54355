"""How much memory there is, where a container allows less than the machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortexmlx.machine import memory_bytes, working_set_bytes


def test_memory_is_the_containers_where_that_is_less(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_text
    limits = {"/sys/fs/cgroup/memory.max": "1048576\n"}

    def read(self: Path, *args: Any, **kwargs: Any) -> str:
        return limits.get(str(self)) or real(self, *args, **kwargs)

    whole = memory_bytes()
    monkeypatch.setattr(Path, "read_text", read)
    assert memory_bytes() == 1048576 < whole
    limits["/sys/fs/cgroup/memory.max"] = "max\n"
    assert memory_bytes() == whole


def test_models_may_use_a_part_of_the_memory() -> None:
    assert memory_bytes() / 2 <= working_set_bytes() <= memory_bytes()
