"""mlx-lm's own caches in place of an arena: their size, and how far they can be cut back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.cache import KVCache as PlainCache

from cortexmlx.attention.mlx_lm_hook import leaves_of, own_caches
from cortexmlx.kv.sizing import sequence_bytes
from cortexmlx.kv.spec import Counts, KVSpec, LayerGroup, group_layers
from cortexmlx.system.machine import obtainable
from cortexmlx.types.arrays import dtype_name

_CUT_EXACTLY = (PlainCache, RotatingKVCache)
"""The classes whose caches are exact after `trim`, if they say that they can be trimmed. Others that say so are not:
one forgets the length and keeps the tokens, another has dropped the tokens of the chunk before.
"""

_MORE = 256
"""By how many tokens a cache of unknown kind is grown to measure its size: a step of mlx-lm's buffers."""

_LOOKED_AT = 8
"""Tokens of a prompt whose first token must not see the others."""

_ROUNDING = 0.5
"""How much two computations of the same logits may differ, as a part of how much these differ from each other."""

_SPARE = 64 << 20
"""Bytes that must be left for a step when the caches grow."""


class OwnCaches:
    """What mlx-lm's model keeps of the sequence that runs, or ran last: its first `length` tokens.

    To the engine this is an arena of `blocks` blocks of `block_size` tokens, but the blocks only count tokens. Nothing
    is allocated beforehand. mlx-lm's buffers grow with the sequence, by up to 256 tokens at a time, and `groups` say
    how many bytes a token takes.
    """

    def __init__(self, model: nn.Module, groups: Sequence[LayerGroup], block_size: int) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.blocks: Counts = (0,)
        self.length = 0
        self._model = model
        self._caches: list[Any] = make_prompt_cache(model)

    def run(self, tokens: mx.array) -> mx.array:
        """Return the model's logits `[1, count, vocab]` for the next tokens `[1, count]`, which the caches keep from
        now on.
        """
        logits: mx.array = self._model(tokens, cache=self._caches)
        self.length += tokens.shape[1]
        return logits

    def rewind(self, tokens: int) -> bool:
        """Cut the caches back to the first `tokens` tokens. To 0 this always works; otherwise only if the result is
        exact. Return False if it is not; then nothing has changed.
        """
        surplus = self.length - tokens
        if not tokens:
            self._caches, self.length = make_prompt_cache(self._model), 0
        elif surplus < 0 or (surplus and not all(map(_can_be_cut, leaves_of(self._caches)))):
            return False
        elif surplus:
            for leaf in leaves_of(self._caches):
                leaf.trim(surplus)
            self.length = tokens
        return True

    # -- as an arena --------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of mlx-lm's buffers now."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Return all arrays of the caches, for evaluation."""
        return [array for leaf in leaves_of(self._caches) for array in _arrays(leaf)]

    def can_resize(self, blocks: Counts) -> bool:
        """Return whether the system has the memory now that a sequence of `blocks` blocks takes, beside what it has
        already.
        """
        wanted = sequence_bytes(self.groups, blocks[0] * self.block_size)
        return obtainable(max(wanted - self.nbytes, 0) + _SPARE)

    def resize(self, blocks: Counts) -> None:
        """Count `blocks` blocks. A longer sequence is forgotten."""
        self.blocks = blocks
        if self.length > blocks[0] * self.block_size:
            self.rewind(0)

    def close(self) -> None:
        """Forget the model, too. It cannot be used afterwards."""
        self.__dict__.pop("_model", None)
        self._caches = []


def kept_by(model: nn.Module) -> tuple[LayerGroup, ...]:
    """Return what mlx-lm's own caches of a model keep, found by forward passes of one sequence that are never
    evaluated. Raises whatever the model's code raises.
    """
    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    specs = [_spec_of(leaf) for leaf in leaves_of(caches)]
    if None in specs:
        before = [_nbytes(leaf) for leaf in leaves_of(caches)]
        model(mx.zeros((1, _MORE), mx.int32), cache=caches)
        measured = (_spec_by_growth(size, _nbytes(leaf)) for size, leaf in zip(before, leaves_of(caches), strict=True))
        return group_layers([known or grown for known, grown in zip(specs, measured, strict=True)])
    return group_layers([spec for spec in specs if spec is not None])


def sees_ahead(model: nn.Module) -> bool:
    """Return whether a token of a prompt has other logits if tokens follow it. Then an answer would depend on how its
    prompt is cut. It computes two short forward passes, and raises whatever they raise.

    Differences by rounding, or by another expert chosen because of it, are far smaller than the differences among one
    token's logits.
    """
    tokens = mx.arange(_LOOKED_AT)[None]
    crowd, alone = (model(t, cache=make_prompt_cache(model))[0, 0].astype(mx.float32) for t in (tokens, tokens[:, :1]))
    some = mx.isfinite(crowd) & mx.isfinite(alone)
    crowd, alone = (mx.where(some, logits, 0.0) for logits in (crowd, alone))
    return bool((mx.linalg.norm(crowd - alone) > _ROUNDING * mx.linalg.norm(alone - mx.mean(alone))).item())


def not_always_cut(model: nn.Module) -> list[str]:
    """Return the names of the model's cache classes that cannot be cut back to fewer tokens, or not once a window is
    full.
    """
    return sorted({type(leaf).__name__ for leaf in own_caches(model) if type(leaf) is not PlainCache})


def _spec_of(leaf: Any) -> KVSpec | None:
    """Return the spec of a cache with keys and values `[1, heads, tokens, dim]`, or with arrays that do not grow; None
    for any other.
    """
    if isinstance(leaf, ArraysCache):
        return KVSpec(0, 0, 0, "float32", row_bytes=_nbytes(leaf))
    keys, values = getattr(leaf, "keys", None), getattr(leaf, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return None
    dtype = dtype_name(keys.dtype)
    return KVSpec(keys.shape[1], keys.shape[-1], values.shape[-1], dtype, getattr(leaf, "max_size", None))


def _spec_by_growth(before: int, after: int) -> KVSpec:
    """Return the spec of a cache that has `before` bytes with one token and `after` bytes with `_MORE` more, in numbers
    of two bytes.
    """
    numbers = -(-(after - before) // (2 * _MORE))
    return KVSpec(1 if numbers else 0, numbers, 0, "float16", row_bytes=max(before - 2 * numbers, 0))


def _can_be_cut(leaf: Any) -> bool:
    return type(leaf) in _CUT_EXACTLY and bool(leaf.is_trimmable())


def _nbytes(leaf: Any) -> int:
    return sum(array.nbytes for array in _arrays(leaf))


def _arrays(leaf: Any) -> list[mx.array]:
    return [part for _, part in tree_flatten(leaf.state) if isinstance(part, mx.array)]
