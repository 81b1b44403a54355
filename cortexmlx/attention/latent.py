"""Latent attention (MLA; DeepSeek-AI, "DeepSeek-V2", 2024) over the paged cache. The cache holds only each token's
latent, from which matrices of each head make its keys and values, and a rotary part of the key that all heads
share.

The matrices can be applied to the queries and to the result instead (*absorbed*). Then all heads attend to one key, the
latent followed by the rotary part, and its value is the latent itself. mlx-lm's classes do so with one token of each
sequence, and all tokens of a step are such tokens. So their code runs unchanged, with other inputs. It sees neither
matrices nor scale, so LatentKV gets the plain queries. It gets the identity instead of the rotary keys, so what it adds
to the scores are the rotary queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.attention.mlx_lm_hook import CustomHandle, LayerCache, ProbeKV, attend
from cortexmlx.attention.paged import AttentionParams, PagedKV, StepDerivedData
from cortexmlx.attention.reference import rounds_coarsely
from cortexmlx.attention.reference_step import is_short
from cortexmlx.errors import ModelUnsupported
from cortexmlx.kv.arena import Slab
from cortexmlx.kv.step import GroupStep, PrefillPiece


def patch_latent_attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a replacement for `__call__` of an MLA class (one with `embed_q` and `unembed_out`) that attends over the
    paged cache.
    """

    def call(self: Any, *given: Any, **named: Any) -> mx.array:
        kept = next((a for a in (*given, *named.values()) if isinstance(a, LayerCache)), None)
        if kept is None:
            return original(self, *given, **named)
        latent = _LatentCache(kept, self)
        named = {name: latent if a is kept else a for name, a in named.items()}
        return original(_MatrixFreeModule(self), *(latent if a is kept else a for a in given), **named)

    return call


def reject_indexer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for `__call__` of a sparse-attention indexer that raises ModelUnsupported with a paged
    cache.
    """

    def call(self: Any, *given: Any, **named: Any) -> Any:
        if any(isinstance(a, LayerCache) for a in (*given, *named.values())):
            raise ModelUnsupported(
                f"an indexer picks the {self.index_topk} tokens that a query attends to, which cannot be paged yet"
            )
        return original(self, *given, **named)

    return call


class _MatrixFreeModule:
    """Proxy of an MLA module whose `embed_q` and `unembed_out` do nothing, because LatentKV applies these matrices
    itself.
    """

    scale = 1.0

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @staticmethod
    def embed_q(queries: mx.array) -> mx.array:
        """Return the queries unchanged."""
        return queries

    @staticmethod
    def unembed_out(attended: mx.array) -> mx.array:
        """Return the attention result unchanged: it is already in the space of the values."""
        return attended


class _LatentCache:
    """The layer cache that an MLA module sees: it stores latents and rotary keys, and returns a LatentKV."""

    def __init__(self, kept: LayerCache, module: Any) -> None:
        self._kept = kept
        self._module = module
        self.offset = kept.offset

    def update_and_fetch(self, latents: mx.array, rotary: mx.array) -> tuple[LatentKV, mx.array]:
        """Store a step's latents and rotary keys `[tokens, 1, 1, dim]`. Return the handle, and an identity matrix in
        the place of the rotary keys.
        """
        handle = self._kept.fetch_keys(mx.concatenate([latents, rotary], axis=-1))
        return LatentKV(handle, self._module, latents.shape[-1]), _identity_matrix(rotary.shape[-1], rotary.dtype)


@cache
def _identity_matrix(size: int, dtype: mx.Dtype) -> mx.array:
    """Return the evaluated identity matrix, made once per size and dtype."""
    identity = mx.eye(size, dtype=dtype)
    mx.eval(identity)
    return identity


@dataclass(frozen=True)
class LatentKV(CustomHandle):
    """The handle of an MLA layer's paged latents. The first `rank` numbers of a key are the latent. `module` has the
    matrices: `embed_q` maps each head's queries into the latents' space, and `unembed_out` maps latents to values.
    """

    paged: PagedKV | ProbeKV
    module: Any
    rank: int

    def attend(self, queries: mx.array, scale: float, added: mx.array | None) -> mx.array:
        """Return the attention `[tokens, heads, 1, value_dim]` of queries `[tokens, heads, 1, nope_dim]` and `added`,
        the rotary queries.

        Raises ModelUnsupported if a module does something else than this page's docstring says.
        """
        kv = self.paged
        if isinstance(kv, ProbeKV):
            kv.value_dim = self.rank
            wanted = (*queries.shape[:-1], kv.keys.shape[-1] - self.rank)
            if added is None or added.shape != wanted or scale != _MatrixFreeModule.scale:
                raise ModelUnsupported("its latent attention is not of the kind that is known")
            return self._attend_absorbed(queries, added, kv)
        assert added is not None
        if not kv.step.pieces:
            return self._attend_absorbed(queries, added, kv)
        found = []
        for part in kv.derived.get(_StepParts, kv.step).parts:
            of, own = slice(part.begin, part.end), replace(kv, step=part.step, derived=part.derived)
            expands = part.piece is not None and self._is_expansion_cheaper(queries, own, part.piece)
            found.append((self._attend_expanded if expands else self._attend_absorbed)(queries[of], added[of], own))
        return found[0] if len(found) == 1 else mx.concatenate(found)

    def _attend_absorbed(self, queries: mx.array, added: mx.array, kv: PagedKV | ProbeKV) -> mx.array:
        """Attend directly to the latents, with the heads' matrices applied to the queries and to the result."""
        absorbed = self.module.embed_q(queries.transpose(2, 1, 0, 3)).transpose(2, 1, 0, 3)
        whole = mx.concatenate([absorbed, added], axis=-1)
        attended = attend(whole, kv, AttentionParams(self.module.scale)).transpose(2, 1, 0, 3)
        values: mx.array = self.module.unembed_out(attended).transpose(2, 1, 0, 3)
        return values

    def _attend_expanded(self, queries: mx.array, added: mx.array, kv: PagedKV) -> mx.array:
        """Attend with a prefill piece to full keys and values that are computed from the latents."""
        whole = mx.concatenate([queries, added], axis=-1)
        return attend(whole, replace(kv, expand=self._expand_latents), AttentionParams(self.module.scale))

    def _expand_latents(self, latents: mx.array) -> Slab:
        """Return the keys and values of all heads, `[heads, tokens, dim]`, computed from latents `[1, tokens,
        rank]`.
        """
        one = latents[None]
        return self.module.embed_q(one, transpose=False)[0], self.module.unembed_out(one)[0]

    def _is_expansion_cheaper(self, queries: mx.array, kv: PagedKV, piece: PrefillPiece) -> bool:
        """Return whether expanding the latents of a piece takes fewer products than attending to the longer latents.
        Always False below float32 on a CPU, where a token must have the same bits in any piece.
        """
        if rounds_coarsely(queries, kv):
            return False
        count, seen, nope = piece.end - piece.begin, piece.tokens, queries.shape[-1]
        value, matrices = self.module.unembed_out.weight.shape[-2], self.rank * nope
        matrices += self.rank * value
        return bool(seen * matrices + count * seen * (nope + value) <= count * matrices + count * seen * 2 * self.rank)


@dataclass(frozen=True)
class _StepPart:
    """Flat tokens `begin .. end` of a step as a step of their own: all decode rows, consecutive short pieces, or one
    `piece`.
    """

    begin: int
    end: int
    step: GroupStep
    piece: PrefillPiece | None
    derived: StepDerivedData


class _StepParts:
    """The parts into which latent attention splits a step, made once for all layers."""

    def __init__(self, step: GroupStep) -> None:
        self.parts: list[_StepPart] = []
        if step.rows:
            self.parts.append(_StepPart(0, step.rows, replace(step, pieces=()), None, StepDerivedData()))
        empty = replace(step, tables=step.tables[:0], lengths=np.zeros(0, np.int32), runs=())
        for _, found in groupby(enumerate(step.pieces), lambda piece: -1 if is_short(piece[1]) else piece[0]):
            pieces = [piece for _, piece in found]
            begin, end = pieces[0].begin, pieces[-1].end
            own = tuple(replace(piece, begin=piece.begin - begin, end=piece.end - begin) for piece in pieces)
            alone = pieces[0] if len(pieces) == 1 else None
            self.parts.append(_StepPart(begin, end, replace(empty, pieces=own), alone, StepDerivedData()))
