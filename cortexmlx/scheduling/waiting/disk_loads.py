"""Disk loads: blocks that waiting prompts get from the disk tier before they begin. No mlx."""

from __future__ import annotations

from collections.abc import Mapping

from cortexmlx.kv.lower import Content, DiskLoad, LowerTier
from cortexmlx.kv.prefix import Key, Match
from cortexmlx.scheduling.job import Job, JobId

_MOST_AT_ONCE = 2
"""Loads that are being read, at most: what is read waits in memory until its prompt begins."""


class DiskLoads:
    """The disk loads of waiting jobs.

    A job requests one load, when its turn comes. It lets others pass while that is read, then begins with what was
    found, or computes it. A job whose next block is in another's load waits for that one.
    """

    def __init__(self, lower: LowerTier | None) -> None:
        self._lower = lower
        self._loads: dict[JobId, DiskLoad] = {}

    def __contains__(self, load: object) -> bool:
        """Whether a load is being read for a job that waits."""
        return any(own is load and own.pieces is None for own in self._loads.values())

    def load_for(self, job: Job, match: Match | None, seconds_per_token: float | None) -> DiskLoad | None:
        """Return the load that continues a job's match, its own or another job's; None if the job begins without one.

        If the load's `pieces` are None, it is still being read, and the job should wait for it. A job whose prompt is
        scored computes all of it.
        """
        lower = self._lower
        if lower is None or match is None or job.being_scored:
            return None
        blocks = len(match.entries)
        read = self._read(job, blocks)
        if read is not None or (blocks + 1) * lower.block_size > job.num_reusable_tokens:
            return read
        reading = [load for load in self._loads.values() if load.pieces is None]
        for load in reading:
            if load.brings(job.keys, blocks):
                return load
        if job.id in self._loads:
            return None
        matched = match.tokens(lower.block_size)
        own = lower.request(job.tokens, job.keys, blocks, matched, job.num_reusable_tokens, seconds_per_token)
        if own is None:
            return None
        if len(reading) >= _MOST_AT_ONCE:
            return reading[0]  # of another text: the job waits for its end, and asks again
        self._loads[job.id] = own
        lower.ask(own)
        return own

    def arrived(self, load: DiskLoad, pieces: Mapping[Key, Content]) -> bool:
        """Take what was read for a load. False if nobody waits for it any more."""
        if load not in self:
            return False
        load.pieces = pieces
        return True

    def _read(self, job: Job, blocks: int) -> DiskLoad | None:
        """The load with pieces that continues the first `blocks` blocks of a job, with no more than it may reuse."""
        most = job.num_reusable_tokens
        loads = self._loads.values()
        return next((load for load in loads if load.continues(job.tokens, job.keys, blocks, most)), None)

    def release(self, job: Job) -> DiskLoad | None:
        """Drop the load of a job that has begun, or never will. Return it if jobs may still wait for it."""
        load = self._loads.pop(job.id, None)
        return load if load is not None and load.pieces is None else None

    def clear(self) -> None:
        """Forget all loads."""
        self._loads.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError unless few loads are being read, each of them for one job."""
        reading = [load for load in self._loads.values() if load.pieces is None]
        assert len(reading) <= _MOST_AT_ONCE, "too many loads are being read"
        assert len({id(load) for load in self._loads.values()}) == len(self._loads), "two jobs have the same load"
