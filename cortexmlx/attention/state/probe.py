"""Finds out how large recurrent states are, and which classes of modules touch them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.pipeline import PipelineMixin

from cortexmlx.attention.state.dispatch import StateLeaf, StateStep, TokenSpan, install
from cortexmlx.attention.state.watch import running_modules
from cortexmlx.errors import ModelUnsupported
from cortexmlx.kv.spec import ITEMSIZE, KVSpec
from cortexmlx.types.arrays import dtype_name

A_STEP = StateStep([TokenSpan(np.array([0], np.int32), piece=False), TokenSpan(np.array([1, 2], np.int32), piece=True)])
"""A step in which every way of cutting shows: a single token, and two tokens of another row."""


class NotedState(ArraysCache):  # type: ignore[misc]
    """A recurrent leaf's cache in a probe. `touched()` is called whenever its arrays are read or written."""

    def __init__(self, size: int, touched: Callable[[], None]) -> None:
        super().__init__(size)
        self._touched = touched

    def __getitem__(self, slot: Any) -> Any:
        self._touched()
        return super().__getitem__(slot)

    def __setitem__(self, slot: Any, value: Any) -> None:
        self._touched()
        super().__setitem__(slot, value)

    def shifted(self, slot: int, new: mx.array) -> mx.array:
        """See `StateLeaf.shifted`. Whole steps may use it, so it does not count as a touch."""
        super().__setitem__(slot, new)
        return mx.zeros_like(new)


class _Touches:
    """The modules that run, the outermost first, and those that ran when a state was touched.

    It does not refer to the states. They keep arrays that were never evaluated, and so all weights, and a cycle of
    references would keep those until the garbage collector runs.
    """

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.touching: list[nn.Module] = []

    def note(self) -> None:
        """Note that a state is touched now. A pipeline touches the last one only to wait until it has sent."""
        if self.running and not isinstance(self.running[-1], PipelineMixin):
            self.touching.append(self.running[-1])


class RecurrentProbe:
    """The recurrent leaves of a model, and what its modules do with them while it is `watched`."""

    def __init__(self, model: nn.Module, own: Sequence[Any]) -> None:
        self._model = model
        self._touches = _Touches()
        self._attending: list[nn.Module] = []
        noted = self._touches.note
        self._caches = {leaf: NotedState(len(c.cache), noted) for leaf, c in enumerate(own) if is_state(c)}

    @property
    def leaves(self) -> list[int]:
        """The recurrent leaves."""
        return list(self._caches)

    def among(self, caches: Sequence[Any]) -> list[Any]:
        """Return the caches of a probe, with those of the recurrent leaves."""
        return [self._caches.get(leaf, cache) for leaf, cache in enumerate(caches)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note which modules touch a state, if there are states."""
        if not self._caches:
            yield
            return
        with running_modules(self._model) as self._touches.running:
            yield

    def attends(self) -> None:
        """Note that a layer attends now."""
        self._attending += self._touches.running

    def install(self) -> None:
        """Have the classes that touch a state called in parts. Raises ModelUnsupported if one of them also attends, or
        calls a module that does: attention needs a whole step.
        """
        both = {type(m).__name__ for m in self._touches.touching if any(m is other for other in self._attending)}
        if both:
            raise ModelUnsupported(f"{', '.join(sorted(both))} keeps a state and attends to keys and values at once")
        install({type(module) for module in self._touches.touching})

    def in_a_step(self, caches: Sequence[Any]) -> list[Any]:
        """Return the caches of a probe in the middle of `A_STEP`, where the recurrent leaves have the caches of any
        step.
        """
        leaves = {leaf: StateLeaf(len(cache.cache)) for leaf, cache in self._caches.items()}
        for leaf in leaves.values():
            leaf.begin(A_STEP, [[None] * leaf.size for _ in A_STEP.parts])
        return [leaves.get(leaf, cache) for leaf, cache in enumerate(caches)]

    def spec(self, leaf: int, rows: int) -> KVSpec:
        """Return what a row keeps in a leaf, after a step of `rows` rows. Raises ModelUnsupported if that is
        unknown.
        """
        arrays = [array for array in self._caches[leaf].cache if array is not None]
        if not arrays:
            raise ModelUnsupported(f"nothing was left in the state of layer {leaf}")
        names = [dtype_name(array.dtype) for array in arrays]
        dtype = next((name for name in names if name in ITEMSIZE), "float32")
        return KVSpec(0, 0, 0, dtype, row_bytes=sum(array.nbytes for array in arrays) // rows)


def is_state(cache: Any) -> bool:
    """Return whether one of mlx-lm's own caches belongs to a recurrent layer."""
    return type(cache) is ArraysCache
