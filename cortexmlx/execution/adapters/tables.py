"""SlotTable: the matrices of several adapters beside one linear layer, and the products with them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from cortexmlx.execution.adapters.route import Part, Route
from cortexmlx.models.adapters.low_rank import Matrix


class SlotTable:
    """The matrices A `[slots, in, rank]` and B `[slots, rank, out]` of a layer, of one type. Slot 0 holds zeros.

    A product is computed in the table's type. Arrays are never changed in place, so steps in flight keep theirs.
    """

    def __init__(self, ins: int, outs: int, rank: int, dtype: mx.Dtype) -> None:
        self._dtype = dtype
        self._set(mx.zeros((1, ins, rank), dtype), mx.zeros((1, rank, outs), dtype))

    def _set(self, a: mx.array, b: mx.array) -> None:
        # Views: a slice of consecutive slots shares the table's memory, and an index would copy.
        views = [(a[slot : slot + 1].squeeze(0), b[slot : slot + 1].squeeze(0)) for slot in range(a.shape[0])]
        mx.eval(views)
        self.a, self.b, self._views = a, b, views  # last: the system may refuse the memory

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return int(self.a.nbytes + self.b.nbytes)

    def append(self, a: Matrix, b: Matrix) -> None:
        """Add a slot with A `[in, r]` and B `[r, out]`, filled up with zeros to the table's rank."""
        rank, r = self.a.shape[-1], a.shape[1]
        one = mx.pad(mx.array(a), [(0, 0), (0, rank - r)]).astype(self._dtype)
        other = mx.pad(mx.array(b), [(0, rank - r), (0, 0)]).astype(self._dtype)
        self._set(mx.concatenate([self.a, one[None]]), mx.concatenate([self.b, other[None]]))

    @property
    def slots(self) -> int:
        """How many slots there are, slot 0 included."""
        return int(self.a.shape[0])

    def open_slot(self, slot: int) -> None:
        """Insert a slot of zeros. Those from `slot` on move by one."""
        zeros = [mx.zeros((1, *array.shape[1:]), self._dtype) for array in (self.a, self.b)]
        a, b = (
            mx.concatenate([array[:slot], empty, array[slot:]])
            for array, empty in zip((self.a, self.b), zeros, strict=True)
        )
        self._set(a, b)

    def keep(self, slots: Sequence[int]) -> None:
        """Keep only these slots, in this order."""
        parts = [(self.a[slot : slot + 1], self.b[slot : slot + 1]) for slot in slots]
        self._set(mx.concatenate([a for a, _ in parts]), mx.concatenate([b for _, b in parts]))

    def added(self, route: Route, x: mx.array, out: mx.array) -> mx.array:
        """Return a layer's output `[..., out]` for `x` `[..., in]`, with what the slots of its tokens add. The tokens
        are those of the route, in order, whatever the leading axes.
        """
        if len(route.parts) == 1:
            return self._part(route.parts[0], x, out)
        rows, results = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1])
        parts = []
        for part in route.parts:
            mine = results[part.begin : part.end]
            parts.append(mine if part.untouched else self._part(part, rows[part.begin : part.end], mine))
        return mx.concatenate(parts).reshape(out.shape)

    def _part(self, part: Part, x: mx.array, out: mx.array) -> mx.array:
        if part.slots is None:
            a, b = self._views[part.slot]
            if x.dtype == out.dtype == self._dtype:
                return mx.addmm(out, x @ a, b)
            return out + ((x.astype(self._dtype) @ a) @ b).astype(out.dtype)
        rows = x.reshape(-1, 1, x.shape[-1]).astype(self._dtype)
        thin = mx.gather_mm(rows, self.a, rhs_indices=part.slots)
        return out + mx.gather_mm(thin, self.b, rhs_indices=part.slots).reshape(out.shape).astype(out.dtype)
