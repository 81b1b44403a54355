"""Recurrent layers in a step of flat tokens.

A step is flat tokens `[T, 1]`, which suits every module that looks at one token only. A recurrent module needs its
row's state and the tokens in order. So the classes that touch a state (the probe finds them) are called in parts: once
with single tokens as a batch `[rows, 1, ...]`, and for each prefill piece with `[1, L, ...]`. Each part has one of
mlx-lm's own caches, so the original method runs unchanged. A step that is one part is one call, on the unchanged
arrays. With any cache but a `StateLeaf`, the original runs as always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from cortexmlx.attention.mlx_lm_hook import Sender
from cortexmlx.errors import ModelUnsupported
from cortexmlx.mlx_lm.modules import replace_method
from cortexmlx.types.arrays import IntArray


@dataclass(frozen=True)
class TokenSpan:
    """Flat tokens of a step that a recurrent module gets in one call: single tokens of n rows as `[n, 1]` (`piece`
    False), or consecutive tokens of one row as `[1, n]`. `goes_on`: its state begins with the one after the part
    before.
    """

    tokens: IntArray
    piece: bool
    goes_on: bool = False

    def cut(self, array: mx.array, tokens: int) -> mx.array:
        """Return the part's share of an array: its tokens of `[tokens, 1, ...]`, each row's first of `[tokens]`
        (positions). Any other array does not belong to tokens, and is returned unchanged.
        """
        per_token = array.ndim > 1 and array.shape[:2] == (tokens, 1)
        if not per_token and array.shape != (tokens,):
            return array
        first, last = int(self.tokens[0]), int(self.tokens[-1])
        if self.piece and not per_token:
            return array[first : first + 1]
        whole = last - first + 1 == len(self.tokens)
        mine = array[first : last + 1] if whole else array[mx.array(self.tokens)]
        return mine.swapaxes(0, 1) if self.piece else mine

    def flat(self, array: mx.array) -> mx.array:
        """Return a result of the part as `[tokens, 1, ...]`."""
        shape = (1, len(self.tokens)) if self.piece else (len(self.tokens), 1)
        if array.shape[:2] != shape:
            raise ModelUnsupported("a recurrent layer gives results that do not belong to single tokens")
        return array.swapaxes(0, 1) if self.piece else array


class StateStep:
    """How a step's `tokens` flat tokens are cut into parts. All leaves share it."""

    def __init__(self, parts: Sequence[TokenSpan]) -> None:
        self.parts = tuple(parts)
        order = np.concatenate([part.tokens for part in parts])
        self.tokens = len(order)
        in_order = bool((order == np.arange(self.tokens)).all())
        self._place = None if in_order else mx.array(np.argsort(order).astype(np.int32))
        self.whole = in_order and len(parts) == 1 and (not parts[0].piece or self.tokens == 1)
        self.called: TokenSpan | None = None
        """The part with which a module is being called; None: modules get all tokens."""

    def joined(self, results: Sequence[Any]) -> Any:
        """Join the results of the parts into one of the step: arrays, tuples of arrays, or None."""
        first = results[0]
        if first is None:
            return None
        if isinstance(first, tuple | list):
            return type(first)(self.joined(each) for each in zip(*results, strict=True))
        return self.in_order(
            mx.concatenate([part.flat(result) for part, result in zip(self.parts, results, strict=True)])
        )

    def in_order(self, flat: mx.array) -> mx.array:
        """Concatenate what the parts have in the order of the flat tokens."""
        return flat if self._place is None else flat[self._place]


class StateLeaf(Sender):
    """A recurrent layer's cache as an mlx-lm model sees it in a step. It has no arrays itself, but `caches`, one of
    mlx-lm's for each part of `step`. Both exist from `begin` to `end`. The arrays with which its module is called go to
    `feed` first.
    """

    lengths = left_padding = None

    def __init__(self, size: int, feed: Callable[..., None] = lambda *_: None) -> None:
        self.size = size
        self._feed = feed
        self.step: StateStep | None = None
        self.caches: list[ArraysCache] = []

    def begin(self, step: StateStep, states: Iterable[Sequence[mx.array | None]]) -> None:
        """Set the states with which the parts begin, arrays `[rows, ...]` each; None for an empty one. A part that goes
        on gets its state during the step.
        """
        self.step, self.caches = step, []
        for state in states:
            cache = ArraysCache(self.size)
            cache.cache = list(state)
            self.caches.append(cache)

    def end(self) -> list[list[mx.array | None]]:
        """Return the states after each part."""
        states = [cache.cache for cache in self.caches]
        self.step, self.caches = None, []
        return states

    def make_mask(self, *_: Any, **__: Any) -> None:
        """Return no mask: no token of a step is padding."""
        return None

    def call(self, original: Callable[..., Any], module: Any, inputs: Sequence[Any], others: dict[str, Any]) -> Any:
        """Call a module's method in parts, and join its results."""
        step = self.step
        assert step is not None, "a model runs outside of a step"
        self._feed(*(value for value in inputs if isinstance(value, mx.array)))
        results: list[Any] = []
        before: list[mx.array | None] = []
        for index, (part, cache) in enumerate(zip(step.parts, self.caches, strict=True)):
            if part.goes_on:
                _hand_over(before, self.caches[index - 1], cache)
            before = list(cache.cache)
            mine = [self._of_part(value, part, cache) for value in inputs]
            named = {name: self._of_part(value, part, cache) for name, value in others.items()}
            step.called = None if step.whole else part
            results.append(original(module, *mine, **named))
        step.called = None
        return results[0] if step.whole else step.joined(results)

    def shifted(self, slot: int, new: mx.array) -> mx.array:
        """Given something for each flat token, `[tokens, ...]`, return that of the token before it in the same row, and
        zeros before the first token. The newest of each row is its state, in `slot`. For modules that see a whole step.
        """
        step = self.step
        assert step is not None, "a model runs outside of a step"
        shifted = []
        for index, (part, cache) in enumerate(zip(step.parts, self.caches, strict=True)):
            first, last = int(part.tokens[0]), int(part.tokens[-1])
            mine = new[first : last + 1] if part.piece else new[mx.array(part.tokens)]
            before = self.caches[index - 1].cache[slot] if part.goes_on else cache.cache[slot]
            newest = mine[-1:] if part.piece else mine
            before = mx.zeros_like(newest) if before is None else before
            shifted.append(mx.concatenate([before, mine[:-1]]) if part.piece else before)
            cache.cache[slot] = newest
        return step.in_order(mx.concatenate(shifted))

    def _of_part(self, value: Any, part: TokenSpan, cache: ArraysCache) -> Any:
        assert self.step is not None
        if value is self:
            return cache
        if isinstance(value, mx.array) and not self.step.whole:
            return part.cut(value, self.step.tokens)
        return value


def _hand_over(before: Sequence[Any], left: ArraysCache, cache: ArraysCache) -> None:
    """Give what a module has just written in a part to the next part. Another module of the same layer may have written
    the rest before.
    """
    for slot, (old, new) in enumerate(zip(before, left.cache, strict=True)):
        if new is not old:
            cache.cache[slot] = new


def install(owners: Iterable[type]) -> None:
    """Have these classes of modules called in parts when they get a `StateLeaf`. Safe to call again."""
    for owner in owners:
        replace_method(owner, "__call__", _dispatching)


def _dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: Any, *inputs: Any, **others: Any) -> Any:
        leaf = next((v for v in (*inputs, *others.values()) if isinstance(v, StateLeaf)), None)
        if leaf is None:
            return original(module, *inputs, **others)
        return leaf.call(original, module, inputs, others)

    return call
