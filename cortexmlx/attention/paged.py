"""`paged_attention`: one function, several backends, the same result.

A step's queries are flat: `[tokens, query_heads, 1, head_dim]`. The single-token queries (decoding rows) come first,
then the prefill pieces, each a stretch of consecutive tokens of one row. `GroupStep` says, for one layer group, where
the keys and values of each of them lie; the scheduler builds it once per step (or once per decode window) for all
layers of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from cortexmlx.errors import KVBlockError
from cortexmlx.kv.arena import KVArena, Quantization, Slab
from cortexmlx.kv.step import GroupStep

_T = TypeVar("_T")


class Derived:
    """What the backends make of a GroupStep once for all its layers (and all steps of a decode window): one object of
    each kind, which says what it holds.
    """

    def __init__(self) -> None:
        self._made: dict[Callable[[GroupStep], Any], Any] = {}

    def get(self, kind: Callable[[GroupStep], _T], step: GroupStep) -> _T:
        """`kind(step)`, made at the first call. `step` is the same in all calls."""
        if kind not in self._made:
            self._made[kind] = kind(step)
        made: _T = self._made[kind]
        return made


class Attend(Protocol):
    """How a backend carries out `paged_attention`: the same arguments, the same result."""

    def __call__(
        self,
        queries: mx.array,
        kv: PagedKV,
        *,
        scale: float,
        sinks: mx.array | None = None,
        softcap: float | None = None,
        slopes: mx.array | None = None,
    ) -> mx.array: ...


@dataclass
class PagedKV:
    """What a layer's cache returns in the place of keys and values: where they lie, for `paged_attention` to read.

    `tail` is the layer's newest tokens, an array `[rows, kv_heads, W, dim]` for each of the slab's, of which
    `tail_tokens` columns are live in every row; `tail_tokens` 0 means that everything is in the arena. `derived` goes
    with `step`. With a `quantization` the slab and the tail are of codes, scales and biases.

    Where values lie in their keys (latent attention), `expand` may say how the latents `[1, tokens, value_dim]` that a
    prefill piece sees become keys and values `[heads, tokens, dim]`: then the queries of the step, which has pieces
    alone, are those of such keys, followed by the numbers for what a stored key has behind its value.
    """

    arena: KVArena
    layer: int
    step: GroupStep
    tail: Slab | None
    tail_tokens: int
    dtype: mx.Dtype
    attend: Attend
    derived: Derived = field(default_factory=Derived)
    quantization: Quantization | None = None
    expand: Callable[[mx.array], Slab] | None = None

    @property
    def value_in_key(self) -> int | None:
        """How many of a key's first numbers are the value, or None where values are stored beside the keys."""
        return self.arena.value_in_key(self.layer)

    def astype(self, _: mx.Dtype) -> PagedKV:
        """Models cast keys to the query's dtype; the backends do that themselves."""
        return self


def paged_attention(
    queries: mx.array,
    kv: PagedKV,
    *,
    scale: float,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    slopes: mx.array | None = None,
) -> mx.array:
    """Softmax attention of flat queries `[tokens, query_heads, 1, head_dim]` over the paged keys and values of `kv`.

    Each query sees its row's tokens up to itself (and no further back than the group's window). `sinks`
    `[query_heads]` are extra logits that take part in the softmax without a value. `softcap` c replaces a logit s by
    `c * tanh(s / c)`. `slopes` `[query_heads]` are those of ALiBi: after scale and cap, a query of head h at position p
    adds `slopes[h] * (t - p)` to the logit of the token at t.

    Returns `[tokens, query_heads, 1, value_dim]` in the dtype of the queries. Raises KVBlockError for slopes in a step
    of listed blocks (`only_blocks`).
    """
    if slopes is not None and kv.step.listed:
        raise KVBlockError(
            "ALiBi's slopes take a token's distance, which a list of blocks leaves open: attend to all blocks, or give "
            "no slopes"
        )
    return kv.attend(queries, kv, scale=scale, sinks=sinks, softcap=softcap, slopes=slopes)
