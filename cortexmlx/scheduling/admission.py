"""Admission: who waits, in what order, and who may begin. No mlx."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from itertools import islice, pairwise

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.cache import BlockCopy
from cortexmlx.kv.prefix import Key, Match
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.running import Rows, can_fork

_NEVER = -1

_LOOKED_AT = 1024
"""How many at the head of the queue are asked whether they can begin: bounds the work of a step."""


class Admission:
    """The queue in front of the rows: `waiting`, in order.

    A client may have `client_tokens` tokens running (None: no limit), prompts and answers together. A running job
    *claims* the blocks of its prompt that it will compute: one whose next block is claimed waits for it instead of
    computing it too. `cached_tokens` of the prompts that began were found in the prefix cache.
    """

    def __init__(self, rows: Rows, client_tokens: int | None) -> None:
        self.client_tokens = client_tokens
        self.waiting: list[Job] = []
        self.cached_tokens = 0
        self._rows = rows
        self._claims: dict[Key, Job] = {}
        self._nobody_at = _NEVER  # `rows.changes` when nobody could begin: nobody can until that or the queue changes

    def enqueue(self, job: Job) -> None:
        """Into the queue behind everyone who comes first."""
        insort(self.waiting, job, key=lambda j: j.order)
        self._nobody_at = _NEVER

    def remove(self, job: Job) -> None:
        """Out of the queue."""
        self.waiting.remove(job)
        self._nobody_at = _NEVER

    def unclaim(self, job: Job) -> None:
        """A job has computed its prompt, or will not: nobody waits for its blocks any more."""
        for key in job.keys:
            if self._claims.get(key) is job:
                del self._claims[key]
        self._nobody_at = _NEVER

    def clear(self) -> None:
        """Forget the queue and all claims."""
        self.waiting.clear()
        self._claims.clear()
        self._nobody_at = _NEVER

    def check_invariants(self) -> None:
        """Raise AssertionError if the queue is out of order, or a claim would never be given up."""
        assert all(a.order < b.order for a, b in pairwise(self.waiting)), "the queue is out of order"
        assert not any(job.running for job in self.waiting), "a running job waits"
        assert all(job in self._rows.jobs for job in self._claims.values()), "a claim of a job that does not run"

    @property
    def possible(self) -> bool:
        """Somebody can begin now."""
        return self._next() is not None

    def admit(self) -> tuple[BlockCopy, ...]:
        """Give rows and blocks to those who can begin; returns the block copies that this takes."""
        copies: list[BlockCopy] = []
        while (found := self._next()) is not None:
            job, match = found
            try:
                copies += self._rows.begin(job, match)
            except KVCacheFull:
                self._nobody_at = self._rows.changes
                break
            self.waiting.remove(job)
            if job.fork_of is not None:
                job.cached = job.fork_of.cached
            elif not job.preemptions:
                job.cached = job.computed
                self.cached_tokens += job.cached
            for key in job.keys[job.computed // self._rows.cache.block_size :]:
                self._claims.setdefault(key, job)
        return tuple(copies)

    def _next(self) -> tuple[Job, Match | None] | None:
        """The first in the queue who can begin now, and what of its tokens is cached; None if nobody can.

        One whose client has its share, whose fork's prompt or whose next block is being computed by another, lets
        others pass. One that waits for memory lets nobody pass.
        """
        rows = self._rows
        if not self.waiting or len(rows.jobs) >= rows.limit or self._nobody_at == rows.changes:
            return None
        held = self._held_by_clients()
        awaited: set[Key] = set()
        for job in islice(self.waiting, _LOOKED_AT):
            if not self._within_share(job, held) or _waits_for_parent(job) or not awaited.isdisjoint(job.keys):
                continue
            match = rows.match(job)
            key = self._claimed(job, match)
            if key is not None:
                awaited.add(key)
                continue
            if rows.fits(job, match):
                return job, match
            break
        self._nobody_at = rows.changes
        return None

    def _held_by_clients(self) -> dict[str, int]:
        """The tokens that each client has running, prompts and answers."""
        held: dict[str, int] = {}
        for job in self._rows.jobs if self.client_tokens is not None else ():
            if job.client is not None:
                held[job.client] = held.get(job.client, 0) + job.most_tokens
        return held

    def _within_share(self, job: Job, held: Mapping[str, int]) -> bool:
        """Whether the job's client may have it running; one request is always allowed."""
        if self.client_tokens is None or job.client is None or not held.get(job.client):
            return True
        return held[job.client] + job.most_tokens <= self.client_tokens

    def _claimed(self, job: Job, match: Match | None) -> Key | None:
        """The next block of a job's tokens, if another is computing it."""
        if match is None or len(match.entries) >= len(job.keys):
            return None
        key = job.keys[len(match.entries)]
        return key if key in self._claims else None


def _waits_for_parent(job: Job) -> bool:
    return job.fork_of is not None and job.fork_of.finish_reason is None and not can_fork(job)
