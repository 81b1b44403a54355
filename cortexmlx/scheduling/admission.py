"""Admission: which waiting job begins next, and whether it fits. Without mlx."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

from cortexmlx.disk.loads import DiskLoads
from cortexmlx.disk.tier import DiskLoad, PieceContent
from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.prefix import Key, PrefixMatch
from cortexmlx.kv.step import BlockCopy
from cortexmlx.scheduling.fair_share import Client, ClientQueues, FairShare, tokens_to_begin
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.latency import CostModel
from cortexmlx.scheduling.running import RunningSet, can_fork

_NEVER = -1
"""A number that `RunningSet.changes` never has. `_nobody_at` is the number of changes at which no job could begin. No
job can until that number or the queue changes.
"""

_MAX_LOOKS = 128
"""How many jobs of one client are looked at in a step, which bounds its work. Jobs that cannot begin are parked, so the
next step continues after them.
"""

_MAX_TOO_LARGE = 16
"""After this many clients' first jobs did not fit, a further job begins in this step only if it fits without any cached
block. To find that out takes microseconds, and no look-up in the prefix cache.
"""

_MAX_PASSED = 2048
"""How many clients are passed over in a step because their first job is too large. It bounds the step's work, too."""

WaitTarget = Key | Job | DiskLoad
"""What a job waits for: a block that another job computes, the job that it forks, or a load from disk."""

AdmissionCandidate = tuple[Job, PrefixMatch | None, DiskLoad | None]
"""A job that can begin, what of its tokens is cached, and the load that continues the match."""


class Admission:
    """The queue of the jobs that wait for a row: decides which one begins next, and whether it fits.

    The next job to begin is one of the client that has had the fewest tokens (see `FairShare`). Priority and age order
    the jobs of one client only. A client's whole queue is passed over for two reasons. The client has its
    `client_tokens` tokens running, prompts and answers together (None: no limit). Or the first job of the queue does
    not fit into the memory. Then each other client may have as many tokens more than this client as the job needs.
    After that no other job begins, so this one begins at last.

    Some jobs are *parked*: they are in no queue, so they block no other job and cost their client nothing. A fork waits
    for its parent's prompt. A job whose next blocks another job computes may wait for them (see `InFlightPrefixes`). A
    job whose next blocks are on disk waits until they are read (see `DiskLoads`). So the time of a step depends on the
    rows, not on the number of waiting jobs. `costs` estimates how long computing takes.
    """

    def __init__(
        self, running: RunningSet, client_tokens: int | None, worth_waiting: int, costs: CostModel | None = None
    ) -> None:
        self.client_tokens = client_tokens
        self.cached_tokens = 0
        """Tokens of the prompts that began that were found in the prefix cache or on disk."""
        self._running = running
        self._shares = FairShare()
        self._queues = ClientQueues(self._shares)
        self._in_flight_prefixes = InFlightPrefixes(running.cache.block_size, worth_waiting)
        self._costs = costs or CostModel()
        self._disk_loads = DiskLoads(running.cache.disk_tier)
        self._waits_for: dict[Job, WaitTarget] = {}
        self._parked: dict[WaitTarget, dict[Job, None]] = {}
        self.count = 0
        """How many wait."""
        self._pooling = 0
        """How many of them end with their prompts, and need no row."""
        self._nobody_at = _NEVER

    @property
    def waiting_jobs(self) -> list[Job]:
        """The waiting jobs, by priority and age."""
        return sorted((*self._queues, *self._waits_for), key=lambda j: j.order)

    def enqueue(self, job: Job) -> None:
        """Put a job into its client's queue, by priority and age. A fork whose parent's prompt is not computed is
        parked.
        """
        self.count += 1
        self._pooling += job.is_pooling
        self._shares.arrive(job)
        self._queues.reorder_client(job.client)
        if job.fork_of is not None and _waits_for_parent(job):
            self._park(job, job.fork_of)
        else:
            self._queues.add(job)
        self._nobody_at = _NEVER

    def remove(self, job: Job) -> None:
        """Take an ended job out of the queue, and wake the jobs that wait for it."""
        self.count -= 1
        self._pooling -= job.is_pooling
        awaited = self._waits_for.pop(job, None)
        if awaited is None:
            self._queues.remove(job)
        else:
            del self._parked[awaited][job]
            if not self._parked[awaited]:
                del self._parked[awaited]
        self._shares.withdraw(job)
        self._release_load(job)
        self._wake([job])

    def release_stored(self, job: Job) -> None:
        """Release the claims to the blocks that a job has stored, and wake the jobs that wait for them."""
        self._wake(self._in_flight_prefixes.release(job, job.num_stored_tokens // self._running.cache.block_size))

    def accept_load(self, load: DiskLoad, pieces: Mapping[Key, PieceContent]) -> None:
        """Take what was read for a disk load, and wake the jobs that wait for it."""
        if self._disk_loads.complete(load, pieces):
            self._wake([load])

    @property
    def is_stalled(self) -> bool:
        """Whether all waiting jobs are parked. If no job runs then, they wait for the disk."""
        return self.count > 0 and self._queues.first is None

    def recheck_queue(self) -> None:
        """Look at the queue again at the next step: answers have become shorter, or a step may have more rows."""
        self._nobody_at = _NEVER

    def release_claims(self, job: Job) -> None:
        """Release all of a job's claims and wake the jobs that wait for it: its prompt is computed, or never will
        be.
        """
        self._wake([*self._in_flight_prefixes.release(job), job])

    def end_running_job(self, job: Job) -> None:
        """Settle the account of a running job that has ended, and release its claims. Its client gets back what it
        paid for tokens that were not generated.
        """
        self._shares.end(job)
        self._queues.reorder_client(job.client)
        self.release_claims(job)

    def clear(self) -> None:
        """Drop the queue, all claims, and the accounts of all clients."""
        self._shares.clear()
        self._queues = ClientQueues(self._shares)
        self._in_flight_prefixes.clear()
        self._disk_loads.clear()
        self._waits_for.clear()
        self._parked.clear()
        self.count = self._pooling = 0
        self._nobody_at = _NEVER

    def check_invariants(self) -> None:
        """Raise AssertionError if a job is lost, out of order, or waits for something that will not happen any more."""
        assert self.count == len(self.waiting_jobs) == len(set(self.waiting_jobs)), "somebody waits twice, or is lost"
        assert not any(job.is_running or job.finish_reason for job in self.waiting_jobs), "a running or ended job waits"
        self._shares.check_invariants()
        self._disk_loads.check_invariants()
        first = min(self._queues, key=lambda j: (self._shares.place(j.client), j.order), default=None)
        assert self._queues.first is first, "the queue is out of order"
        assert all(owner in self._running.jobs for owner in self._in_flight_prefixes.owners), (
            "a claim of a job that does not run"
        )
        parked = {(job, awaited) for awaited, jobs in self._parked.items() for job in jobs}
        assert set(self._waits_for.items()) == parked, "a job is parked for something else than it waits for"
        for job, awaited in self._waits_for.items():
            if isinstance(awaited, Job):
                waits = _waits_for_parent(job)
            elif isinstance(awaited, DiskLoad):
                waits = awaited in self._disk_loads
            else:
                waits = awaited in self._in_flight_prefixes
            assert waits, f"job {job.id} waits for what has happened"

    def can_admit(self) -> bool:
        """Return whether `admit` would give a job a row. Jobs that turn out to wait for something are parked."""
        return self._find_candidate() is not None

    def admit(self) -> tuple[BlockCopy, ...]:
        """Give rows and blocks to the waiting jobs that can begin. Return the block copies that this takes.

        A step's loads are planned here and nowhere else. Until the last one is planned, no source of a copy is evicted
        (see `prepare_memory`).
        """
        try:
            return tuple(self._admit_jobs())
        finally:
            self._running.cache.release_copy_sources()

    def _admit_jobs(self) -> list[BlockCopy]:
        """Begin waiting jobs, one after the other, until none can begin. Return their block copies."""
        copies: list[BlockCopy] = []
        while (found := self._find_candidate()) is not None:
            job, match, load = found
            match = self._running.make_room(job, match)
            try:
                copies += self._running.begin(job, match, load)
            except KVCacheFull:
                self._nobody_at = self._running.changes
                break
            self._queues.remove(job)
            self.count -= 1
            self._pooling -= job.is_pooling
            self._shares.begin(job)
            self._queues.reorder_client(job.client)
            self._release_load(job)
            if job.fork_of is not None:
                job.cached = job.fork_of.cached
            elif not job.generation:
                job.cached = job.num_computed_tokens
                self.cached_tokens += job.cached
            self._in_flight_prefixes.claim(job)
        return copies

    def _find_candidate(self) -> AdmissionCandidate | None:
        """Return the first job that can begin now; None if none can."""
        running = self._running
        if not self.count or self._nobody_at == running.changes:
            return None
        if running.rows >= running.backoff.rows and not self._pooling:
            return None
        try:
            return self._search_queues()
        finally:
            self._queues.bring_back()

    def _search_queues(self) -> AdmissionCandidate | None:
        """Return the first job that can begin, in the order of the clients' turns; None if none can. Park those that
        wait for something.
        """
        running, tokens = self._running, self._running_tokens()
        looked: Counter[Client] = Counter()
        limit, too_large, passed = math.inf, 0, 0
        room: list[int] = []
        self._settle_accounts()
        while (job := self._queues.first) is not None and self._shares.tokens(job.client) <= limit:
            if not running.has_place_for(job):
                passed += 1
                if passed == _MAX_PASSED:
                    break
                self._queues.pass_over(job.client)
                continue
            if not self._is_within_limit(job, tokens):
                self._queues.pass_over(job.client)
                continue
            if looked[job.client] == _MAX_LOOKS and running.jobs:
                self._queues.pass_over(job.client)
                continue
            if too_large >= _MAX_TOO_LARGE and not running.fits_uncached(job, room):
                too_large += 1
                if too_large == _MAX_PASSED:
                    break
                self._queues.pass_over(job.client)
                continue
            looked[job.client] += 1
            match = running.match(job)
            awaited = job.fork_of if _waits_for_parent(job) else self._block_to_await(job, match)
            if awaited is not None:
                self._queues.remove(job)
                self._park(job, awaited)
                if isinstance(awaited, Key) and running.cache.states.has_states:
                    job.has_awaited_state = True
                    self._in_flight_prefixes.keep_state(awaited)
            elif not running.fits(job, match):
                limit = min(limit, self._shares.tokens(job.client) + tokens_to_begin(job))
                too_large += 1
                room = room or running.obtainable_blocks
                self._queues.pass_over(job.client)
            else:
                load = self._load_for(job, match)
                if load is None or load.pieces is not None:
                    return job, match, load
                self._queues.remove(job)
                self._park(job, load)
        if _MAX_LOOKS not in looked.values():
            self._nobody_at = running.changes
        return None

    def _settle_accounts(self) -> None:
        """Charge the clients for what their running jobs have generated."""
        for job in self._running.jobs:
            if self._shares.settle(job):
                self._queues.reorder_client(job.client)

    def _block_to_await(self, job: Job, match: PrefixMatch | None) -> Key | None:
        """Return the block of another job that a job should wait for; None if it should not wait.

        With recurrent states a job waits only once: the state may have been dropped, and all jobs that wait for it
        would begin one after the other.
        """
        snapshots = self._running.cache.states.snapshots
        in_vain = snapshots is not None and (job.has_awaited_state or not snapshots.most)
        return None if match is None or in_vain else self._in_flight_prefixes.block_to_await(job, match)

    def _load_for(self, job: Job, match: PrefixMatch | None) -> DiskLoad | None:
        """Return the disk load that continues a job's match; its pieces may not have been read yet. None for a fork
        that takes its parent's blocks.
        """
        if self._running.parent_to_fork(job) is not None:
            return None
        return self._disk_loads.load_for(job, match, self._costs.seconds_per_token)

    def _release_load(self, job: Job) -> None:
        """Release a job's disk load, and wake the jobs that wait for the same load."""
        load = self._disk_loads.release(job)
        if load is not None:
            self._wake([load])

    def _park(self, job: Job, awaited: WaitTarget) -> None:
        """Take a job out of the queues until `awaited` has happened."""
        self._waits_for[job] = awaited
        self._parked.setdefault(awaited, {})[job] = None

    def _wake(self, happened: Iterable[WaitTarget]) -> None:
        """Put the jobs that wait for any of these things back into their queues."""
        for awaited in happened:
            for job in self._parked.pop(awaited, ()):
                del self._waits_for[job]
                self._queues.add(job)
        self._nobody_at = _NEVER

    def _running_tokens(self) -> dict[str, int]:
        """Return how many tokens each client has running, prompts and answers."""
        tokens: dict[str, int] = {}
        for job in self._running.jobs if self.client_tokens is not None else ():
            if job.client is not None:
                tokens[job.client] = tokens.get(job.client, 0) + job.max_total_tokens
        return tokens

    def _is_within_limit(self, job: Job, tokens: Mapping[str, int]) -> bool:
        """Return whether the job keeps its client within `client_tokens`. One request is always allowed."""
        if self.client_tokens is None or job.client is None or not tokens.get(job.client):
            return True
        return tokens[job.client] + job.max_total_tokens <= self.client_tokens


def _waits_for_parent(job: Job) -> bool:
    """Return whether a fork has to wait until its parent's prompt is computed."""
    parent = job.fork_of
    if parent is None or parent.drops or job.drops:  # it has other tokens than the prompt that both began with
        return False
    return parent.finish_reason is None and not can_fork(job)


# In-flight prefixes: prompt blocks that a running job computes, which other jobs may wait for.


WORTH_WAITING = 32
"""Prompt tokens that cost about as much as an empty step: as many as a GPU can multiply while it reads a weight."""


class InFlightPrefixes:
    """The prompt blocks that running jobs *claim*, because they compute them and have not stored them yet. A job that
    would compute the same blocks may wait for them.

    Waiting saves the shared tokens and costs a step, since the row is empty meanwhile. A step has a price whatever it
    computes, because it reads all weights. So a job waits if that saves it at least `worth_waiting` tokens, which cost
    as much. The bar is low on purpose: all waiting jobs together pay for one step, and each of them saves the tokens.
    """

    def __init__(self, block_size: int, worth_waiting: int) -> None:
        self._block_size = block_size
        self._worth_waiting = max(1, worth_waiting)
        self._owners: dict[Key, Job] = {}
        self._open: dict[Job, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._owners

    @property
    def owners(self) -> set[Job]:
        """The jobs that claim blocks."""
        return {*self._owners.values(), *self._open}

    def claim(self, job: Job) -> None:
        """Claim the uncached blocks of a prompt that a job begins to compute."""
        self._open[job] = job.num_computed_tokens // self._block_size
        for key in job.keys[self._open[job] :]:
            self._owners.setdefault(key, job)

    def release(self, job: Job, blocks: int | None = None) -> list[Key]:
        """Release the claims to a job's first `blocks` blocks, which are stored (None: all its claims). Return the
        keys that no job claims any more.
        """
        begin = self._open.pop(job, len(job.keys))
        if blocks is not None and blocks < len(job.keys):
            self._open[job] = blocks
        freed = [key for key in job.keys[begin:blocks] if self._owners.get(key) is job]
        for key in freed:
            self._owners.pop(key, None)
        return freed

    def block_to_await(self, job: Job, match: PrefixMatch) -> Key | None:
        """Return the last of the blocks after `match` that a job shares with another one that computes them. None if
        it should not wait for them.
        """
        begin = len(match.entries)
        owner = self._owners.get(job.keys[begin]) if begin < len(job.keys) else None
        if owner is None:
            return None
        both = range(min(len(job.keys), len(owner.keys)))
        end = bisect_left(both, True, lo=begin + 1, key=lambda i: job.keys[i] != owner.keys[i])
        shared = min(end * self._block_size, job.num_reusable_tokens)
        if shared - begin * self._block_size - match.partial_tokens < self._worth_waiting:
            return None
        last = job.keys[end - 1]
        return last if last in self._owners else job.keys[begin]

    def keep_state(self, block: Key) -> None:
        """Have the job that computes a claimed block keep the recurrent state after it."""
        if (owner := self._owners.get(block)) is not None:
            owner.cuts.add((owner.keys.index(block) + 1) * self._block_size)

    def clear(self) -> None:
        """Drop all claims."""
        self._owners.clear()
        self._open.clear()
