"""Disk loads: blocks that waiting prompts get from the disk tier before they begin. No mlx."""

from __future__ import annotations

from collections.abc import Mapping

from cortexmlx.kv.lower import Content, LoadRequest, LoadResult, LowerTier
from cortexmlx.kv.prefix import Key, Match
from cortexmlx.scheduling.job import Job, JobId

_MOST_AT_ONCE = 2
"""Wishes that are being read, at most: what is read waits in memory until its prompt begins."""


class DiskLoads:
    """The load requests that jobs wait for, and their results.

    A job has one load request, when its turn comes: it lets others pass while that is read, and begins with what was
    found, or computes it. One whose next block is in another's waits for that.
    """

    def __init__(self, lower: LowerTier | None) -> None:
        self._lower = lower
        self._reading: dict[JobId, LoadRequest] = {}
        self._asked: set[JobId] = set()
        self._found: dict[JobId, LoadResult] = {}

    def __contains__(self, load_request: object) -> bool:
        return load_request in self._reading.values()

    def awaited(self, job: Job, match: Match | None, seconds_per_token: float | None) -> LoadRequest | None:
        """The load request that a job waits for, its own or another's; None if it can begin. One whose text is to be
        scored computes all of it.
        """
        lower = self._lower
        if lower is None or match is None or job.being_scored or self.found(job, match) is not None:
            return None
        blocks = len(match.entries)
        if (blocks + 1) * lower.block_size > job.num_reusable_tokens:
            return None
        for load_request in self._reading.values():
            if load_request.begin <= blocks < load_request.begin + len(load_request.keys) and job.keys[
                blocks : blocks + 1
            ] == [load_request.keys[blocks - load_request.begin]]:
                return load_request
        if job.id in self._asked:
            return None
        matched = match.tokens(lower.block_size)
        own = lower.load_request(job.tokens, job.keys, blocks, matched, job.num_reusable_tokens, seconds_per_token)
        if own is None:
            return None
        if len(self._reading) >= _MOST_AT_ONCE:
            return next(iter(self._reading.values()))
        self._asked.add(job.id)
        self._reading[job.id] = own
        lower.ask(own)
        return own

    def arrived(self, load_request: LoadRequest, pieces: Mapping[Key, Content]) -> bool:
        """Take the result of a load request. Return False if nobody waits for it any more."""
        owner = next((job for job, own in self._reading.items() if own is load_request), None)
        if owner is None:
            return False
        del self._reading[owner]
        end = load_request.end(pieces)
        if end > load_request.begin:
            self._found[owner] = LoadResult(load_request, end, pieces)
        return True

    def found(self, job: Job, match: Match) -> LoadResult | None:
        """What was found that a job can begin with behind a match, its own or another's: no more than it may reuse."""
        if job.being_scored:
            return None
        blocks, most = len(match.entries), job.num_reusable_tokens
        return next((f for f in self._found.values() if f.continues(job.tokens, job.keys, blocks, most)), None)

    def release(self, job: Job) -> LoadRequest | None:
        """A job has begun, or never will: what was found for it goes. Returns the load request that is still read for
        it, for which nobody is to wait any more.
        """
        self._found.pop(job.id, None)
        self._asked.discard(job.id)
        return self._reading.pop(job.id, None)

    def clear(self) -> None:
        """Forget all load requests."""
        self._reading.clear()
        self._asked.clear()
        self._found.clear()
