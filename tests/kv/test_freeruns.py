"""The index of free runs beside a plain list of them: the shortest that fits, whatever the lengths."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from cortexmlx.kv.allocator import NO_RUN, FreeRunIndex

LENGTHS = st.one_of(st.integers(1, 6), st.integers(1020, 1030), st.sampled_from([2047, 2048, 5000]))
"""Also across the groups of 1,024 neighbouring lengths."""


@given(st.lists(LENGTHS, min_size=1, max_size=12), st.data())
def test_the_newest_of_the_shortest_that_fit(lengths: list[int], data: st.DataObject) -> None:
    """The arena is cut into pieces, which come and go as free runs in any order."""
    total = sum(lengths)
    pieces = [(sum(lengths[:i]), length) for i, length in enumerate(lengths)]
    runs, model = FreeRunIndex(), list[tuple[int, int]]()  # oldest first
    runs.resize(total)
    for place in data.draw(st.lists(st.integers(0, len(pieces) - 1), max_size=24)):
        start, length = pieces[place]
        if pieces[place] in model:
            model.remove(pieces[place])
            assert runs.remove(start) == length
        else:
            model.append(pieces[place])
            runs.insert(start, length)
            assert runs.length_at(start) == runs.length_at(start + length - 1) == length
        runs.check_invariants(dict(model), total)
        assert runs.longest_length() == max((length for _, length in model), default=0)
        for n in {1, *lengths, *(length + 1 for length in lengths)}:
            if n <= total:
                fitting = [run for run in model if run[1] >= n]
                shortest = min((run[1] for run in fitting), default=0)
                newest = [run[0] for run in fitting if run[1] == shortest]
                assert runs.find_best_fit(n) == (newest[-1] if newest else NO_RUN)
