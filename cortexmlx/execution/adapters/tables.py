"""SlotTable: the matrices of several adapters beside one linear layer, and the products with them."""

from __future__ import annotations

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

    def append(self, slots: int, a: Matrix, b: Matrix) -> None:
        """Add a slot after the first `slots`, with A `[in, r]` and B `[r, out]`, filled up with zeros to the table's
        rank. Slots behind those go.
        """
        rank, r = self.a.shape[-1], a.shape[1]
        one = mx.pad(mx.array(a), [(0, 0), (0, rank - r)]).astype(self._dtype)
        other = mx.pad(mx.array(b), [(0, rank - r), (0, 0)]).astype(self._dtype)
        self._set(mx.concatenate([self.a[:slots], one[None]]), mx.concatenate([self.b[:slots], other[None]]))

    @property
    def slots(self) -> int:
        """How many slots there are, slot 0 included."""
        return int(self.a.shape[0])

    def copy(self, slot: int, to: int) -> None:
        """Make the matrices of one slot those of another slot `to` before it, too."""
        a, b = (mx.concatenate([each[:to], each[slot : slot + 1], each[to + 1 :]]) for each in (self.a, self.b))
        self._set(a, b)

    def keep(self, slots: int) -> None:
        """Keep only the first `slots`, of which there are at least two: slot 0 and another."""
        if slots < self.slots:
            # Of two parts: one slice would share the memory of all slots.
            a, b = (mx.concatenate([each[:1], each[1:slots]]) for each in (self.a, self.b))
            self._set(a, b)

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
