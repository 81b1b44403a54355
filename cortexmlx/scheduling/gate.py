"""The pipeline gate: may the next step run ahead of the one in flight, and if not, why? Without mlx."""

from __future__ import annotations

from collections import Counter
from enum import Enum

from cortexmlx.scheduling.admission import Admission
from cortexmlx.scheduling.decode_window import DecodeWindow
from cortexmlx.scheduling.running import RunningSet
from cortexmlx.types.request import RequestState

AHEAD = "ahead"
"""The name in `stats()` of steps that ran ahead."""


class Drain(Enum):
    """Why a step can be planned only when everything in flight is committed."""

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
    VERIFY = "verify"
    """It verifies drafted tokens. How far the row gets is known when it is done."""
    CONTRADICTED = "contradicted"
    """The tokens that were awaited have left none of the drafts, so there is nothing to verify."""
    HISTORY = "history"
    """A row's sampling looks at tokens that are in flight."""
    UNPIPELINED = "unpipelined"
    """The model, or the engine's configuration, lets no step run ahead."""

    @property
    def ends_window(self) -> bool:
        """Whether the step writes the arena, so that the decode window ends before it."""
        return self not in (Drain.CONTRADICTED, Drain.HISTORY, Drain.UNPIPELINED)


class Gate:
    """Decides for each step whether it may run ahead. `steps` counts the planned steps by reason; None counts those
    that ran ahead.
    """

    def __init__(self, running: RunningSet, window: DecodeWindow, admission: Admission, pipeline: bool) -> None:
        self.steps: Counter[Drain | None] = Counter()
        self._running = running
        self._window = window
        self._admission = admission
        self._pipeline = pipeline
        self._waiting_for: Drain | None = None

    def reason(self, in_flight: int) -> Drain | None:
        """Return why nothing may be in flight for the next step; None if it may run ahead. A reason that ends the
        window stays until nothing is in flight, except for drafts.
        """
        reason: Drain | None = Drain.CONTRADICTED if self._waiting_for is Drain.VERIFY else self._waiting_for
        if reason is None or not reason.ends_window:
            found = self._found()
            reason = found if in_flight else found or reason
        self._waiting_for = reason if in_flight else None
        return reason

    def forget(self) -> None:
        """Note that nothing is in flight any more, because rows begin again."""
        self._waiting_for = None

    def _found(self) -> Drain | None:
        """Return the reason at this moment. MLX writes the arena in place only when nothing else is in flight
        (`KVArena`).
        """
        jobs, window, admission = self._running.jobs, self._window, self._admission
        prefills = drops = verifies = False
        for job in jobs:
            prefills = prefills or job.state is RequestState.PREFILLING
            drops = drops or (job.keep is not None and job.must_drop)
            verifies = verifies or job.verifying != () or (job.drafts != () and job.can_decode)
        if prefills:
            return Drain.PROMPT
        if drops:
            return Drain.DROP
        if window.wants_flush:
            return Drain.FLUSH
        if admission.count and admission.somebody_can_begin():
            return Drain.ADMISSION
        if admission.count and window.awaiting_flush:
            return Drain.MEMORY
        if verifies:
            return Drain.VERIFY
        if not self._pipeline:
            return Drain.UNPIPELINED
        opens = window.column == 0
        if opens and any(job.needs_history and job.num_planned_outputs > job.generated for job in jobs):
            return Drain.HISTORY
        return None
