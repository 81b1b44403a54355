"""The ways of decode attention are timed against each other."""

from __future__ import annotations

from cortexmlx.bench.suites.choices import time_attention
from cortexmlx.bench.suites.kernels import KernelShape
from cortexmlx.stats import ChoiceSource

SMALL = KernelShape(3, 40, kv_heads=2, group=2, dim=16)


def test_each_class_up_to_the_largest_shape_is_timed() -> None:
    told: list[str] = []
    found = time_attention([SMALL, KernelShape(1, 20, 2, 2, 16)], 8, "reference", told.append)
    assert [choice.batch for choice in found] == [
        "1 row in one run, up to 512 tokens",
        "2 to 4 rows, up to 512 tokens",
        "1 row in pieces, up to 512 tokens",
    ]
    assert all(choice.source is ChoiceSource.TIMED and len(choice.seconds) == 2 for choice in found)
    assert told == ["ways of decode attention, head_dim 16, 2 query heads per KV head"]


def test_the_simulators_times_say_nothing() -> None:
    assert time_attention([SMALL], 8, "sim", lambda what: None) == ()
