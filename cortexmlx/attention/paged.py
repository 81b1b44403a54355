"""The interface of paged attention: `paged_attention`, its parameters, and the handle that a layer's cache returns.
All backends give the same result.

A step's queries are flat: `[tokens, query_heads, 1, head_dim]`. The single-token queries (decoding rows) come first,
then the prefill pieces, each with consecutive tokens of one row. `GroupStep` says where the keys and values of one
layer group are. The scheduler builds it once per step (or once per decode window) for all layers of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx

from cortexmlx.kv.arena import KVArena, Quantization, Slab
from cortexmlx.kv.step import GroupStep
from cortexmlx.types.arrays import dtype_name

_T = TypeVar("_T")


class StepDerivedData:
    """Data that a backend derives from a GroupStep, by kind: once for all layers, and all steps of a decode window."""

    def __init__(self) -> None:
        self._data: dict[Callable[[GroupStep], Any], Any] = {}

    def get(self, kind: Callable[[GroupStep], _T], step: GroupStep) -> _T:
        """Return `kind(step)`, made at the first call. `step` must be the same in all calls."""
        if kind not in self._data:
            self._data[kind] = kind(step)
        data: _T = self._data[kind]
        return data


@dataclass(frozen=True, eq=False)
class AttentionParams:
    """A layer's softmax parameters. Each query sees its row's tokens up to itself, within the group's window."""

    scale: float
    """The factor of the products of queries and keys."""
    sinks: mx.array | None = None
    """`[query_heads]`: additional logits that take part in the softmax without a value."""
    softcap: float | None = None
    """Replaces a logit s by `softcap * tanh(s / softcap)`."""
    slopes: mx.array | None = None
    """`[query_heads]`, those of ALiBi: after scale and cap, a query of head h at position p adds `slopes[h] * (t - p)`
    to the logit of the token at t.
    """


@dataclass(frozen=True)
class AttentionCall:
    """What decides which kernels can serve a layer's attention: query dtype, heads, head size, options in use."""

    dtype: str
    """The dtype of the queries."""
    query_heads: int
    query_dim: int
    softcap: bool
    sinks: bool
    slopes: bool

    @classmethod
    def from_arguments(cls, queries: mx.array, params: AttentionParams) -> AttentionCall:
        """Return the call with these arguments of `paged_attention`."""
        _, heads, _, dim = queries.shape
        present = (term is not None for term in (params.softcap, params.sinks, params.slopes))
        return cls(dtype_name(queries.dtype), heads, dim, *present)


@dataclass
class PagedKV:
    """The handle that a layer's cache returns instead of keys and values: it says where they are in the arena and the
    tail.

    `tail` has the layer's newest tokens: an array `[rows, kv_heads, W, dim]` for each array of the slab. `tail_tokens`
    of its columns are live in every row; 0 means that everything is in the arena. `derived` belongs to `step`. With a
    `quantization`, slab and tail have codes, scales and biases.

    If values are part of their keys (latent attention), `expand` may turn the latents `[1, tokens, value_dim]` that a
    prefill piece sees into keys and values `[heads, tokens, dim]`. Then the step has pieces only, and its queries
    belong to such keys, followed by the numbers for what a stored key has after its value.
    """

    arena: KVArena
    layer: int
    step: GroupStep
    tail: Slab | None
    tail_tokens: int
    dtype: mx.Dtype
    attend: Attend
    derived: StepDerivedData = field(default_factory=StepDerivedData)
    quantization: Quantization | None = None
    expand: Callable[[mx.array], Slab] | None = None
    replace_queries: Callable[[mx.array], mx.array] | None = None
    """Returns what to attend with in the place of the model's queries, which a kernel has computed with the tail."""

    @property
    def value_in_key(self) -> int | None:
        """How many of a key's first numbers are the value; None if values are stored separately."""
        return self.arena.value_in_key(self.layer)

    def astype(self, _: mx.Dtype) -> PagedKV:
        """Return the handle unchanged: models cast keys to the queries' dtype, which the backends do themselves."""
        return self


Attend = Callable[[mx.array, PagedKV, AttentionParams], mx.array]
"""How a backend computes `paged_attention`: the same arguments, the same result."""


def paged_attention(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
    """Return the softmax attention of flat queries `[tokens, query_heads, 1, head_dim]` over the paged keys and values
    of `kv`: `[tokens, query_heads, 1, value_dim]` in the dtype of the queries.
    """
    return kv.attend(queries, kv, params)
