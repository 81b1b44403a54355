"""What the runner hands to attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from cortexmlx.attention.paged import Derived, PagedKV
from cortexmlx.kv.step import GroupStep
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of


def test_what_a_backend_derives_goes_with_the_group_step(tiny: Callable[[str], Path]) -> None:
    """All layers of a group, and all steps of a decode window, share it; another group or another step never does."""
    driver = Driver(tiny("windowed llama"))
    runner = driver.core.runner
    attend = runner._attend
    seen: list[tuple[int, GroupStep, Derived]] = []

    def watched(queries: mx.array, kv: PagedKV, **options: Any) -> mx.array:
        seen.append((kv.layer, kv.step, kv.derived))
        return attend(queries, kv, **options)

    runner._attend = watched
    driver.answers([tokens_of(20), tokens_of(9, seed=1)], 24)

    layers, together = defaultdict(list), {}
    for layer, step, derived in seen:
        assert together.setdefault(id(step), derived) is derived
        layers[id(derived)].append(layer)
    assert len(layers) == len(together), "two steps share what was derived from one of them"
    groups = [set(group.layers) for group in driver.core.cache.groups]
    assert len(groups) == 2 and all(set(found) in groups for found in layers.values())
    assert max(len(found) for found in layers.values()) == 16 * max(len(group) for group in groups)
