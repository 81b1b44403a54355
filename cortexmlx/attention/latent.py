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
    """Return a new `__call__` for an MLA class (with `embed_q` and `unembed_out`) that attends over the paged cache."""

    def patched_call(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        layer_cache = next((a for a in (*args, *kwargs.values()) if isinstance(a, LayerCache)), None)
        if layer_cache is None:
            return original(self, *args, **kwargs)
        latent = _LatentCache(layer_cache, self)
        kwargs = {name: latent if a is layer_cache else a for name, a in kwargs.items()}
        return original(_MatrixFreeModule(self), *(latent if a is layer_cache else a for a in args), **kwargs)

    return patched_call


def reject_indexer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a new `__call__` for a sparse-attention indexer that raises ModelUnsupported with a paged cache."""

    def patched_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, LayerCache) for a in (*args, *kwargs.values())):
            raise ModelUnsupported(
                f"an indexer picks the {self.index_topk} tokens that a query attends to, which cannot be paged yet"
            )
        return original(self, *args, **kwargs)

    return patched_call


class _MatrixFreeModule:
    """Proxy of an MLA module with no-op `embed_q` and `unembed_out`, because LatentKV applies these matrices itself."""

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
    def unembed_out(output: mx.array) -> mx.array:
        """Return the attention result unchanged: it is already in the space of the values."""
        return output


class _LatentCache:
    """The layer cache that an MLA module sees: it stores latents and rotary keys, and returns a LatentKV."""

    def __init__(self, layer_cache: LayerCache, module: Any) -> None:
        self._layer_cache = layer_cache
        self._module = module
        self.offset = layer_cache.offset

    def update_and_fetch(self, latents: mx.array, rotary: mx.array) -> tuple[LatentKV, mx.array]:
        """Store latents and rotary keys `[tokens, 1, 1, dim]`. Return a LatentKV, and for keys an identity matrix."""
        handle = self._layer_cache.update_and_fetch_keys(mx.concatenate([latents, rotary], axis=-1))
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

    def attend(self, queries: mx.array, scale: float, score_term: mx.array | None) -> mx.array:
        """Return the attention `[tokens, heads, 1, value_dim]` of queries `[tokens, heads, 1, nope_dim]`. `score_term`
        has the rotary part of the queries.

        Raises ModelUnsupported if a probed module attends in another way than the docstring of this file says.
        """
        kv = self.paged
        if isinstance(kv, ProbeKV):
            kv.value_dim = self.rank
            expected_shape = (*queries.shape[:-1], kv.keys.shape[-1] - self.rank)
            if score_term is None or score_term.shape != expected_shape or scale != _MatrixFreeModule.scale:
                raise ModelUnsupported("its latent attention is not of the kind that is known")
            return self._attend_absorbed(queries, score_term, kv)
        assert score_term is not None
        if not kv.step.pieces:
            return self._attend_absorbed(queries, score_term, kv)
        outputs = []
        for part in kv.derived.get(_StepParts, kv.step).parts:
            token_slice, part_kv = slice(part.begin, part.end), replace(kv, step=part.step, derived=part.derived)
            expands = part.piece is not None and self._is_expansion_cheaper(queries, part_kv, part.piece)
            outputs.append(
                (self._attend_expanded if expands else self._attend_absorbed)(
                    queries[token_slice], score_term[token_slice], part_kv
                )
            )
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _attend_absorbed(self, queries: mx.array, rotary_queries: mx.array, kv: PagedKV | ProbeKV) -> mx.array:
        """Attend directly to the latents, with the heads' matrices applied to the queries and to the result."""
        absorbed_queries = self.module.embed_q(queries.transpose(2, 1, 0, 3)).transpose(2, 1, 0, 3)
        full_queries = mx.concatenate([absorbed_queries, rotary_queries], axis=-1)
        output = attend(full_queries, kv, AttentionParams(self.module.scale)).transpose(2, 1, 0, 3)
        values: mx.array = self.module.unembed_out(output).transpose(2, 1, 0, 3)
        return values

    def _attend_expanded(self, queries: mx.array, rotary_queries: mx.array, kv: PagedKV) -> mx.array:
        """Attend with a prefill piece to full keys and values that are computed from the latents."""
        full_queries = mx.concatenate([queries, rotary_queries], axis=-1)
        return attend(full_queries, replace(kv, expand=self._expand_latents), AttentionParams(self.module.scale))

    def _expand_latents(self, latents: mx.array) -> Slab:
        """Return the keys and values of all heads, `[heads, tokens, dim]`, from latents `[1, tokens, rank]`."""
        batched_latents = latents[None]
        return self.module.embed_q(batched_latents, transpose=False)[0], self.module.unembed_out(batched_latents)[0]

    def _is_expansion_cheaper(self, queries: mx.array, kv: PagedKV, piece: PrefillPiece) -> bool:
        """Return whether expanding latents for a piece takes fewer products than attending to the (longer) latents.
        Always False below float32 on a CPU, where a token must have the same bits in any piece.
        """
        if rounds_coarsely(queries, kv):
            return False
        count, visible_tokens, nope_dim = piece.end - piece.begin, piece.tokens, queries.shape[-1]
        value_dim, matrices = self.module.unembed_out.weight.shape[-2], self.rank * nope_dim
        matrices += self.rank * value_dim
        return bool(
            visible_tokens * matrices + count * visible_tokens * (nope_dim + value_dim)
            <= count * matrices + count * visible_tokens * 2 * self.rank
        )


@dataclass(frozen=True)
class _StepPart:
    """Flat tokens `begin .. end` of a step as their own `step`: all decode rows, several short pieces, or one piece."""

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
        for _, group in groupby(enumerate(step.pieces), lambda piece: -1 if is_short(piece[1]) else piece[0]):
            pieces = [piece for _, piece in group]
            begin, end = pieces[0].begin, pieces[-1].end
            part_pieces = tuple(replace(piece, begin=piece.begin - begin, end=piece.end - begin) for piece in pieces)
            lone_piece = pieces[0] if len(pieces) == 1 else None
            self.parts.append(_StepPart(begin, end, replace(empty, pieces=part_pieces), lone_piece, StepDerivedData()))
