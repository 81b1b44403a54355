"""WindowStep: a step of a decode window by what differs from the step before. Without mlx.

Within a window, a step follows from the one before: each row is one token farther. A whole plan of 16 rows takes 700
bytes, this takes ten.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from cortexmlx.arrays import IntArray
from cortexmlx.hosts.wire.codec import broken
from cortexmlx.kv.state.snapshots import StateOps
from cortexmlx.scheduling.steps.plan import Segment, StepKind, StepPlan


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
    if before is None or plan.kind is not StepKind.DECODE or before.kind is not StepKind.DECODE:
        return None
    if plan.groups is not None or len(plan.segments) != len(before.segments):
        return None
    live = np.packbits([segment.live for segment in plan.segments], bitorder="little").tobytes()
    step = WindowStep(plan.number, live, plan.tokens, plan.states)
    return step if same_plan(step.after(before), plan) else None


def same_plan(a: StepPlan, b: StepPlan) -> bool:
    """Return whether two plans without groups say the same."""
    return all(_same(getattr(a, field.name), getattr(b, field.name)) for field in fields(StepPlan))


def _same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and np.array_equal(a, b)
    return bool(a == b)
