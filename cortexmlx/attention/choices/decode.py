"""DecodeChoices: the way that each layer's single tokens take in each class of steps. ReferenceAttention: the reference
backend with such choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import mlx.core as mx

from cortexmlx.attention import reference
from cortexmlx.attention.choices.batch_class import BatchClass
from cortexmlx.attention.choices.layer import LayerAttention, LayerKey, layer_key
from cortexmlx.attention.choices.ways import PLAIN, AttendRows, Way
from cortexmlx.attention.paged import Attend, PagedKV
from cortexmlx.attention.reference import rounds_coarsely


class DecodeChoices:
    """The choices of a backend. Without any, its rules choose.

    A step's class is what its decode window began with, and choices change only while nothing is computed. So a row
    keeps its way within a window.
    """

    def __init__(self) -> None:
        self.reproducible = False
        """Whether one way serves a layer in all classes, with the same bits for a row alone and in any batch."""
        self._ways: dict[tuple[LayerKey, BatchClass], Way] = {}

    def take(self, ways: Mapping[tuple[LayerKey, BatchClass], Way]) -> None:
        """Use these ways from now on, and the rules for everything else."""
        self._ways = dict(ways)

    def way(self, key: LayerKey, kv: PagedKV) -> Way | None:
        """Return the way for a layer in its step; None: the rules choose."""
        if not self._ways:
            return None
        return self._ways.get((key, kv.derived.get(BatchClass.of, kv.step)))


class ChoosingBackend(Protocol):
    """A backend that takes the way it is told."""

    choices: DecodeChoices

    @property
    def attend(self) -> Attend:
        """What computes attention as it is told."""

    def own_ways(self, layer: LayerAttention) -> tuple[Way, ...]:
        """Return the ways that serve a layer and are not in `PLAIN`. The first is the rules' choice."""

    def fixed_way(self, layer: LayerAttention) -> Way:
        """Return the way that serves a layer if `choices.reproducible`."""

    def attend_by(self, way: Way, layer: LayerAttention) -> AttendRows:
        """Return what computes a layer's single tokens by a way. Raises CannotServe."""


def reproducible_way(coarse: bool, softcap: bool, sinks: bool, slopes: bool) -> Way:
    """Return the plain way in which a row has the same bits alone and in any batch. Where a CPU rounds coarsely
    (`reference.rounds_coarsely`), that is already so on the reference path, unless no model attends so.
    """
    of_no_model = slopes or (softcap and sinks)
    return Way.REFERENCE if coarse and not of_no_model else Way.ROWS


class ReferenceAttention:
    """The reference backend."""

    def __init__(self) -> None:
        self.choices = DecodeChoices()

    def attend(
        self,
        queries: mx.array,
        kv: PagedKV,
        *,
        scale: float,
        sinks: mx.array | None = None,
        softcap: float | None = None,
        slopes: mx.array | None = None,
    ) -> mx.array:
        """See `paged_attention`."""
        parts = []
        if kv.step.rows:
            way = self._way(queries, kv, sinks, softcap, slopes)
            attend_rows = reference.attend_rows if way is None else PLAIN[way]
            parts.append(attend_rows(queries, kv, scale, sinks, softcap, slopes))
        if kv.step.pieces:
            apart = self.choices.reproducible
            parts += reference.attend_pieces(queries, kv, scale, sinks, softcap, slopes, apart=apart)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _way(
        self,
        queries: mx.array,
        kv: PagedKV,
        sinks: mx.array | None,
        softcap: float | None,
        slopes: mx.array | None,
    ) -> Way | None:
        """Return the way of a step; None: the rules of `reference.attend_rows`."""
        if self.choices.reproducible:
            asked = softcap is not None, sinks is not None, slopes is not None
            return reproducible_way(rounds_coarsely(queries, kv), *asked)
        return self.choices.way(layer_key(queries, kv, sinks, softcap, slopes), kv)

    def own_ways(self, layer: LayerAttention) -> tuple[Way, ...]:
        """See `ChoosingBackend`."""
        return ()

    def fixed_way(self, layer: LayerAttention) -> Way:
        """See `ChoosingBackend`."""
        return reproducible_way(layer.coarse, layer.softcap is not None, layer.sinks is not None, layer.slopes)

    def attend_by(self, way: Way, layer: LayerAttention) -> AttendRows:
        """See `ChoosingBackend`."""
        return PLAIN[way]
