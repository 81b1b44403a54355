"""Whether the next step may run ahead of the one in flight, and why not. No mlx."""

from __future__ import annotations

from enum import Enum

from cortexmlx.scheduling.decode_window import DecodeWindow
from cortexmlx.scheduling.running import RunningSet
from cortexmlx.scheduling.waiting.admission import Admission

AHEAD = "ahead"
"""What `stats()` calls a step for which nothing is drained."""


class Drain(Enum):
    """Why a step is not planned before everything in flight is committed."""

    PROMPT = "prompt"
    """It computes a piece of a prompt, which is written to the arena."""
    DROP = "drop"
    """A row begins again without some of its tokens."""
    FLUSH = "flush"
    """The decode window is full, or too many of its lanes have ended: its tail goes to the arena."""
    ADMISSION = "admission"
    """A request begins."""
    MEMORY = "memory"
    """Requests wait, and blocks of ended rows are free only after a flush."""
    HISTORY = "history"
    """A row's sampling looks at tokens that are in flight."""
    UNPIPELINED = "unpipelined"
    """The model, or the engine's configuration, lets no step run ahead."""

    @property
    def ends_window(self) -> bool:
        """The step writes the arena, so the decode window ends before it."""
        return self not in (Drain.HISTORY, Drain.UNPIPELINED)


def reason_to_drain(running: RunningSet, window: DecodeWindow, admission: Admission, pipeline: bool) -> Drain | None:
    """Why the next step needs that nothing is in flight; None: it may run ahead.

    MLX writes the arena in place only when nothing else is in flight (see `KVArena`).
    """
    if running.prefilling:
        return Drain.PROMPT
    if running.dropping:
        return Drain.DROP
    if window.wants_flush:
        return Drain.FLUSH
    if admission.somebody_can_begin():
        return Drain.ADMISSION
    if window.awaiting_flush and len(admission):
        return Drain.MEMORY
    if not pipeline:
        return Drain.UNPIPELINED
    opens = window.column == 0
    if opens and any(job.needs_history and job.num_planned_outputs > job.generated for job in running.jobs):
        return Drain.HISTORY
    return None
