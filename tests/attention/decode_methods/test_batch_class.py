"""The classes of rows and lengths."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.attention.decode_methods import ROW_BOUNDS, TOKEN_BOUNDS, BatchClass, batch_classes
from cortexmlx.attention.paged import StepDerivedData
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.kv.step import GroupStep

EVERYTHING = AttentionWindow()


def step(lengths: list[int], window: AttentionWindow = EVERYTHING, run: bool = False) -> GroupStep:
    runs = (KVHandle(0, 1000) if run else None,) * len(lengths)
    return GroupStep(np.zeros((len(lengths), 1), np.int32), np.array(lengths, np.int32), runs, (), window)


def test_a_step_is_classed_by_its_rows_and_the_longest_of_them() -> None:
    assert BatchClass.from_step(step([512])) == BatchClass(1, 512)
    assert BatchClass.from_step(step([513], run=True)) == BatchClass(1, 4096, run=True)
    assert BatchClass.from_step(step([5, 7], run=True)) == BatchClass(4, 512), (
        "each row is one run, but it is not alone"
    )
    assert BatchClass.from_step(step([1, 2, 3, 4, 5000])) == BatchClass(16, None)
    assert BatchClass.from_step(step([9] * 17)) == BatchClass(None, 512)
    assert BatchClass.from_step(step([0])) == BatchClass(1, 512)


def test_what_a_window_hides_does_not_count() -> None:
    assert BatchClass.from_step(step([100_000], AttentionWindow(300))) == BatchClass(1, 512)
    assert BatchClass.from_step(step([100_000], AttentionWindow(2000))) == BatchClass(1, 4096)
    assert BatchClass.from_step(step([2048 + 100], AttentionWindow(2048, chunked=True))) == BatchClass(1, 512)


def test_a_decode_windows_class_is_what_it_begins_with() -> None:
    """The same object for all its steps and layers, whatever the tail holds meanwhile."""
    derived, begun = StepDerivedData(), step([510])
    first = derived.get(BatchClass.from_step, begun)
    assert all(derived.get(BatchClass.from_step, begun) is first for _ in range(16))


@given(st.integers(1, 40), st.integers(1, 40_000), st.data())
def test_every_step_that_an_engine_makes_is_in_one_of_its_classes(
    max_rows: int, longest: int, data: st.DataObject
) -> None:
    every = batch_classes(max_rows, longest)
    assert len(set(every)) == len(every) <= (len(ROW_BOUNDS) + 2) * (len(TOKEN_BOUNDS) + 1)
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=max_rows))
    mine = BatchClass.from_step(step(lengths, run=data.draw(st.booleans())))
    assert mine in every
    assert mine.max_total_tokens is None or mine.max_total_tokens >= len(lengths) * max(lengths)


@given(st.integers(1, 40), st.integers(1, 40_000))
def test_a_class_is_timed_on_a_step_that_an_engine_can_make(max_rows: int, longest: int) -> None:
    for batch in batch_classes(max_rows, longest):
        rows, tokens = batch.sample_size(max_rows, longest)
        assert 1 <= rows <= max_rows and 1 <= tokens <= longest
        assert BatchClass.from_step(step([1] * rows)).rows == batch.rows
