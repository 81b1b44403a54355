"""Memory that is refused in the middle of a step: what MLX's allocator raises on a Mac, at the places where it may."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from cortexmlx.execution.boundary import return_refusals
from cortexmlx.scheduling.plan import StepPlan

SAID = "[malloc] Unable to allocate 1048576 bytes."
"""What MLX raises, as a RuntimeError, when Metal gives no buffer."""

PLACES = ("before", "half written", "under way", "collecting", "collected")
"""Where in a step: before it begins; when the first half of the arena is written and the rest only planned; when all of
it is on its way; while somebody waits for its results; when they are there, and read too late."""


class Refusals:
    """Refuses memory to a core's steps, wherever `where(plan)` names one of `PLACES`; None lets a step go on. `count`
    of them have been refused so far."""

    def __init__(self, core: Any, where: Callable[[StepPlan], str | None]) -> None:
        self.count = 0
        self._core = core
        self._where = where
        self._places: deque[str | None] = deque()
        self._runner, self._forward = core.runner, core.runner._forward
        self._dispatch, self._collect, self._choose = core.runner.dispatch, core.runner.collect, core.runner.choose
        core.runner.dispatch, core.runner.collect = return_refusals(self.dispatch), return_refusals(self.collect)
        core.runner.choose = self.choose

    def dispatch(self, plan: StepPlan) -> Any:
        """In the place of the runner's own."""
        place = self._where(plan)
        if place == "before":
            self._refuse()
        if place == "half written":
            self._runner._forward = self._half
        try:
            refused = self._dispatch(plan)
        finally:
            self._runner._forward = self._forward
        if refused is not None:
            self._places.clear()
            return refused
        if place in ("half written", "under way"):  # a flush has no forward pass
            self._refuse()
        self._places.append(place)
        return None

    def choose(self, mask: Any = None) -> Any:
        """In the place of the runner's own. The two parts of a step with masks are not refused anything here."""
        refused = self._choose(mask)
        if refused is None:
            self._places.append(None)
        else:
            self._places.clear()
        return refused

    def collect(self) -> Any:
        """In the place of the runner's own."""
        place = self._places.popleft()
        if place == "collecting":
            self._refuse()
        result = self._collect()
        if place == "collected":
            self._refuse()
        return result

    def _half(self, *args: Any) -> Any:
        self._forward(*args)
        arrays = self._core.runner.arena.arrays()
        mx.eval(arrays[: len(arrays) // 2])
        self._refuse()

    def _refuse(self) -> None:
        self.count += 1
        self._places.clear()
        raise RuntimeError(SAID)
