"""WindowStep: a step of a decode window by what differs from the step before. Without mlx.

Within a window, a step follows from the one before: each row is one token farther. A whole plan of 16 rows takes 700
bytes, this takes ten.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from cortexmlx.distributed.wire.codec import broken
from cortexmlx.kv.snapshots import StateOps
from cortexmlx.scheduling.plan import Segment, StepKind, StepPlan
from cortexmlx.types.arrays import IntArray

_FIELDS = [field.name for field in fields(StepPlan)]


@dataclass(frozen=True)
class WindowStep:
    """What cannot be told from the step before."""

    number: int
    live: bytes
    """A bit for each lane, the lowest first: whether its job gets a token."""
    tokens: IntArray | None
    states: StateOps

    def after(self, before: StepPlan) -> StepPlan:
        """Return the whole plan. Raises HostLost if it cannot follow `before`."""
        lanes = len(before.segments)
        if before.kind is not StepKind.DECODE or len(self.live) != -(-lanes // 8):
            broken(f"a step of a window with {8 * len(self.live)} lanes follows a {before.kind.value} step of {lanes}")
        live = np.unpackbits(np.frombuffer(self.live, np.uint8), count=lanes, bitorder="little").astype(np.int32)
        segments = tuple(
            [
                Segment(s.job, s.generation, at := (s.first + 1) * bit, 1, range(at, at + 1), live=bit == 1)
                for s, bit in zip(before.segments, live.tolist(), strict=True)
            ]
        )
        return replace(
            before,
            number=self.number,
            segments=segments,
            logit_segments=segments,
            tokens=self.tokens,
            source=None,
            positions=(before.positions + 1) * live,
            token_index=(before.token_index + 1) * live,
            sampling=None,
            groups=None,
            column=before.column + 1,
            flush=None,
            copies=(),
            loads=(),
            states=self.states,
        )


def window_step(before: StepPlan | None, plan: StepPlan) -> WindowStep | None:
    """Return `plan` by what differs from the step `before` it; None if that does not say all of it."""
    if before is None or before.kind is not StepKind.DECODE or plan.groups is not None:
        return None
    if len(plan.segments) != len(before.segments):
        return None
    live = np.packbits(np.array([s.live for s in plan.segments], bool), bitorder="little").tobytes()
    step = WindowStep(plan.number, live, plan.tokens, plan.states)
    after = step.after(before)
    return step if all(_same(getattr(after, name), getattr(plan, name)) for name in _FIELDS) else None


def _same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return a is b or not (isinstance(a, np.ndarray) or isinstance(b, np.ndarray) or a != b)
