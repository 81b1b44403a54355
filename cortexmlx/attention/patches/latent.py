"""Latent attention (MLA; DeepSeek-AI, "DeepSeek-V2", 2024): a token's latent, from which a matrix of each head makes
the head's key and another its value, and a rotary part of the key that all heads share, are all that is kept.

The matrices can be taken to the queries and to the result instead (*absorbed*): then all heads attend to one key, the
latent followed by the rotary part, whose value is the latent itself. So do mlx-lm's classes with one token of each
sequence, which all tokens of a step are. Their code runs as it is here, up to four things that it is given: it sees
neither matrices nor scale, so that its queries come as they are to LatentKV; and in the place of the rotary keys there
is the identity, so that what it adds to the scores are the queries of the rotary part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.attention.mlx_lm_hook import LayerCache, OwnHandle, ProbeKV, attend
from cortexmlx.attention.paged import Derived, PagedKV
from cortexmlx.attention.reference import rounds_coarsely
from cortexmlx.errors import ModelUnsupported
from cortexmlx.kv.arena import Slab
from cortexmlx.kv.step import GroupStep, PrefillPiece


def attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """In the place of `__call__` of a class with `embed_q` and `unembed_out`."""

    def call(self: Any, *given: Any, **named: Any) -> mx.array:
        kept = next((a for a in (*given, *named.values()) if isinstance(a, LayerCache)), None)
        if kept is None:
            return original(self, *given, **named)
        latent = _LatentCache(kept, self)
        named = {name: latent if a is kept else a for name, a in named.items()}
        return original(_WithoutMatrices(self), *(latent if a is kept else a for a in given), **named)

    return call


def indexer(original: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of `__call__` of a class that picks the tokens of a latent layer that each query sees."""

    def call(self: Any, *given: Any, **named: Any) -> Any:
        if any(isinstance(a, LayerCache) for a in (*given, *named.values())):
            raise ModelUnsupported(
                f"an indexer picks the {self.index_topk} tokens that a query attends to, which cannot be paged yet"
            )
        return original(self, *given, **named)

    return call


class _WithoutMatrices:
    """A module as its forward pass sees it: what LatentKV does is left out."""

    scale = 1.0

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @staticmethod
    def embed_q(queries: mx.array) -> mx.array:
        """The queries, not absorbed."""
        return queries

    @staticmethod
    def unembed_out(attended: mx.array) -> mx.array:
        """What LatentKV gives is of the heads' values already."""
        return attended


class _LatentCache:
    """A layer's cache as such a module sees it."""

    def __init__(self, kept: LayerCache, module: Any) -> None:
        self._kept = kept
        self._module = module
        self.offset = kept.offset

    def update_and_fetch(self, latents: mx.array, rotary: mx.array) -> tuple[LatentKV, mx.array]:
        """Take a step's latents and rotary keys `[tokens, 1, 1, dim]`; return the handle, and the identity."""
        handle = self._kept.fetch_keys(mx.concatenate([latents, rotary], axis=-1))
        return LatentKV(handle, self._module, latents.shape[-1]), _identity(rotary.shape[-1], rotary.dtype)


@cache
def _identity(size: int, dtype: mx.Dtype) -> mx.array:
    identity = mx.eye(size, dtype=dtype)
    mx.eval(identity)
    return identity


@dataclass(frozen=True)
class LatentKV(OwnHandle):
    """The handle of such a layer. `rank` numbers of a key are the latent; `module` has the matrices: `embed_q`, of
    each head's queries into the latents' space, and `unembed_out`, of latents into values.
    """

    paged: PagedKV | ProbeKV
    module: Any
    rank: int

    def attend(self, queries: mx.array, scale: float, added: mx.array | None) -> mx.array:
        """Attention, `[tokens, heads, 1, value_dim]` of the heads, of queries `[tokens, heads, 1, nope_dim]` and
        `added`, those of the rotary part.

        Raises ModelUnsupported if a module deviates from what is said above.
        """
        kv = self.paged
        if isinstance(kv, ProbeKV):
            kv.value_dim = self.rank
            wanted = (*queries.shape[:-1], kv.keys.shape[-1] - self.rank)
            if added is None or added.shape != wanted or scale != _WithoutMatrices.scale:
                raise ModelUnsupported("its latent attention is not of the kind that is known")
            return self._absorbed(queries, added, kv)
        assert added is not None
        if not kv.step.pieces:
            return self._absorbed(queries, added, kv)
        found = []
        for part in kv.derived.get(_Parts, kv.step).parts:
            of, own = slice(part.begin, part.end), replace(kv, step=part.step, derived=part.derived)
            expands = part.piece is not None and self._expands(queries, own, part.piece)
            found.append((self._expanded if expands else self._absorbed)(queries[of], added[of], own))
        return found[0] if len(found) == 1 else mx.concatenate(found)

    def _absorbed(self, queries: mx.array, added: mx.array, kv: PagedKV | ProbeKV) -> mx.array:
        """Attention to the latents as they lie there. The heads' matrices meet all tokens at once."""
        absorbed = self.module.embed_q(queries.transpose(2, 1, 0, 3)).transpose(2, 1, 0, 3)
        whole = mx.concatenate([absorbed, added], axis=-1)
        attended = attend(whole, kv, scale=self.module.scale).transpose(2, 1, 0, 3)
        values: mx.array = self.module.unembed_out(attended).transpose(2, 1, 0, 3)
        return values

    def _expanded(self, queries: mx.array, added: mx.array, kv: PagedKV) -> mx.array:
        """Attention of a piece to keys and values that are made for it, as mlx-lm's classes do with several tokens."""
        whole = mx.concatenate([queries, added], axis=-1)
        return attend(whole, replace(kv, expand=self._keys_and_values), scale=self.module.scale)

    def _keys_and_values(self, latents: mx.array) -> Slab:
        """Of `[1, tokens, rank]` those of all heads, `[heads, tokens, dim]`."""
        one = latents[None]
        return self.module.embed_q(one, transpose=False)[0], self.module.unembed_out(one)[0]

    def _expands(self, queries: mx.array, kv: PagedKV, piece: PrefillPiece) -> bool:
        """Whether the keys and values of all that a piece sees cost fewer products than attention to latents, which are
        longer. Not below float32 on a CPU, where a token must come out the same bits in whatever piece it is.
        """
        if rounds_coarsely(queries, kv):
            return False
        count, seen, nope = piece.end - piece.begin, piece.tokens, queries.shape[-1]
        value, matrices = self.module.unembed_out.weight.shape[-2], self.rank * nope
        matrices += self.rank * value
        return bool(seen * matrices + count * seen * (nope + value) <= count * matrices + count * seen * 2 * self.rank)


@dataclass(frozen=True)
class _Part:
    """Tokens `begin .. end` of a step as a step of their own: the single ones, or a `piece`."""

    begin: int
    end: int
    step: GroupStep
    piece: PrefillPiece | None
    derived: Derived


class _Parts:
    """The parts of a step, made once for all layers."""

    def __init__(self, step: GroupStep) -> None:
        self.parts: list[_Part] = []
        if step.rows:
            self.parts.append(_Part(0, step.rows, replace(step, pieces=()), None, Derived()))
        empty = replace(step, tables=step.tables[:0], lengths=np.zeros(0, np.int32), runs=())
        for piece in step.pieces:
            alone = replace(empty, pieces=(replace(piece, begin=0, end=piece.end - piece.begin),))
            self.parts.append(_Part(piece.begin, piece.end, alone, piece, Derived()))
