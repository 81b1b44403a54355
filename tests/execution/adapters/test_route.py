"""Which tokens are multiplied with which slot's matrices."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.execution.adapters import GATHER_LIMIT, LONG_RUN, Route, make_route


def slots_of(route: Route) -> list[int]:
    """The slot of each token, as the parts say."""
    slots: list[int] = []
    for part in route.parts:
        assert part.begin == len(slots) < part.end
        own = [part.slot] * (part.end - part.begin) if part.slots is None else part.slots.tolist()
        assert len(own) == part.end - part.begin
        slots += own
    return slots


RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=8)


@given(RUNS)
def test_every_token_gets_its_own_slot(runs: list[tuple[int, int]]) -> None:
    slots = np.concatenate([np.full(count, slot, np.int32) for slot, count in runs])
    route = make_route(slots)
    if route is None:
        assert not slots.any()
    else:
        assert slots_of(route) == slots.tolist() and route.tokens == len(slots)
        assert any(not part.is_unchanged for part in route.parts)


def test_one_slot_is_one_product_however_many_tokens_there_are() -> None:
    for count in (1, GATHER_LIMIT, 500):
        route = make_route(np.full(count, 2, np.int32))
        assert route is not None and [(p.slot, p.slots) for p in route.parts] == [(2, None)]


def test_few_tokens_are_gathered_in_one_call() -> None:
    route = make_route(np.array([0] * 20 + [1] * 12, np.int32))
    assert route is not None and len(route.parts) == 1 and route.parts[0].slots is not None


def test_long_runs_are_products_of_their_own_and_the_rest_is_gathered() -> None:
    route = make_route(np.array([1, 2, 3, *[2] * 100, *[0] * LONG_RUN, 1, 1, 3], np.int32))
    assert route is not None
    assert [(p.begin, p.end, p.is_unchanged, p.slots is None) for p in route.parts] == [
        (0, 3, False, False),
        (3, 103, False, True),
        (103, 103 + LONG_RUN, True, True),
        (103 + LONG_RUN, 106 + LONG_RUN, False, False),
    ]
