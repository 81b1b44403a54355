"""Admission: which waiting job begins next, and whether it fits. Without mlx."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from cortexmlx.disk.loads import DiskLoads
from cortexmlx.disk.tier import DiskLoad, PieceContent
from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.prefix import Key, PrefixMatch
from cortexmlx.kv.step import BlockCopy
from cortexmlx.scheduling.fair_share import Client, ClientQueues, FairShare, tokens_to_begin
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.latency import CostModel
from cortexmlx.scheduling.running import RunningSet, can_fork
from cortexmlx.types.images import PreparedImage

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

WaitTarget = Key | Job | DiskLoad | PreparedImage
"""What a job waits for: a block that another job computes, the job that it forks, a load from disk, or an image that
the model looks at.
"""

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
    job whose next blocks are on disk waits until they are read (see `DiskLoads`). A job with images that are not cached
    waits until the vision tower has encoded them. So the time of a step depends on the
    rows, not on the number of waiting jobs. `cost_model` estimates how long computing takes.
    """

    def __init__(
        self,
        running_set: RunningSet,
        client_tokens: int | None,
        worth_waiting: int,
        cost_model: CostModel | None = None,
    ) -> None:
        self.client_tokens = client_tokens
        self.prompt_tokens = self.cached_tokens = 0
        """Tokens of the prompts that began, and those of them that were found in the prefix cache or on disk."""
        self._running_set = running_set
        self._shares = FairShare()
        self._queues = ClientQueues(self._shares)
        self._in_flight_prefixes = InFlightPrefixes(running_set.cache.block_size, worth_waiting)
        self._cost_model = cost_model or CostModel()
        self._disk_loads = DiskLoads(running_set.cache.disk_tier)
        self._waits_for: dict[Job, WaitTarget] = {}
        self._parked_jobs: dict[WaitTarget, dict[Job, None]] = {}
        self.count = 0
        """How many wait."""
        self._num_pooling = 0
        """How many of them end with their prompts, and need no row."""
        self._nobody_at = _NEVER
        self.request_features: Callable[[Sequence[PreparedImage]], PreparedImage | None] = lambda images: None
        """Asks for the features of images. Returns the last image to wait for; None if all features are there."""

    @property
    def jobs_awaiting_images(self) -> list[Job]:
        """The jobs that wait for the features of their images."""
        return [job for job, target in self._waits_for.items() if isinstance(target, PreparedImage)]

    def note_image_encoded(self, image: PreparedImage) -> None:
        """Wake the jobs that wait for the features of an image."""
        self._wake([image])

    @property
    def waiting_jobs(self) -> list[Job]:
        """The waiting jobs, by priority and age."""
        return sorted((*self._queues, *self._waits_for), key=lambda j: j.order)

    def enqueue(self, job: Job) -> None:
        """Put a job into its client's queue, by priority and age. Park a fork whose parent's prompt is not computed."""
        self.count += 1
        self._num_pooling += job.is_pooling
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
        self._num_pooling -= job.is_pooling
        wait_target = self._waits_for.pop(job, None)
        if wait_target is None:
            self._queues.remove(job)
        else:
            del self._parked_jobs[wait_target][job]
            if not self._parked_jobs[wait_target]:
                del self._parked_jobs[wait_target]
        self._shares.withdraw(job)
        self._release_load(job)
        self._wake([job])

    def release_stored_claims(self, job: Job) -> None:
        """Release the claims to the blocks that a job has stored, and wake the jobs that wait for them."""
        self._wake(self._in_flight_prefixes.release(job, job.num_stored_tokens // self._running_set.cache.block_size))

    def accept_load(self, load: DiskLoad, pieces: Mapping[Key, PieceContent]) -> None:
        """Give a disk load the pieces that were read for it, and wake the jobs that wait for it."""
        if self._disk_loads.complete(load, pieces):
            self._wake([load])

    @property
    def is_stalled(self) -> bool:
        """Whether all waiting jobs are parked. If no job runs then, they wait for the disk or for images."""
        return self.count > 0 and self._queues.first is None

    def recheck_queue(self) -> None:
        """Look at the queue again at the next step, because more may fit now."""
        self._nobody_at = _NEVER

    def release_claims(self, job: Job) -> None:
        """Release all claims of a job and wake the jobs that wait for it: its prompt is computed, or never will be."""
        self._wake([*self._in_flight_prefixes.release(job), job])

    def end_running_job(self, job: Job) -> None:
        """Settle a running job that has ended: release its claims, pay its client back for tokens not generated."""
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
        self._parked_jobs.clear()
        self.count = self._num_pooling = 0
        self._nobody_at = _NEVER

    def check_invariants(self) -> None:
        """Raise AssertionError if a job is lost, out of order, or waits for something that will not happen any more."""
        assert self.count == len(self.waiting_jobs) == len(set(self.waiting_jobs)), "somebody waits twice, or is lost"
        assert not any(job.is_running or job.finish_reason for job in self.waiting_jobs), "a running or ended job waits"
        self._shares.check_invariants()
        self._disk_loads.check_invariants()
        first = min(self._queues, key=lambda j: (self._shares.place(j.client), j.order), default=None)
        assert self._queues.first is first, "the queue is out of order"
        assert all(owner in self._running_set.jobs for owner in self._in_flight_prefixes.owners), (
            "a claim of a job that does not run"
        )
        parked_pairs = {(job, wait_target) for wait_target, jobs in self._parked_jobs.items() for job in jobs}
        assert set(self._waits_for.items()) == parked_pairs, "a job is parked for something else than it waits for"
        for job, awaited in self._waits_for.items():
            if isinstance(awaited, Job):
                still_waits = _waits_for_parent(job)
            elif isinstance(awaited, DiskLoad):
                still_waits = awaited in self._disk_loads
            elif isinstance(awaited, PreparedImage):
                still_waits = job.request.images is not None and job.request.images.shows(awaited)
            else:
                still_waits = awaited in self._in_flight_prefixes
            assert still_waits, f"job {job.id} waits for what has happened"

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
            self._running_set.cache.release_copy_sources()

    def _admit_jobs(self) -> list[BlockCopy]:
        """Begin waiting jobs, one after the other, until none can begin. Return their block copies."""
        copies: list[BlockCopy] = []
        while (candidate := self._find_candidate()) is not None:
            job, match, load = candidate
            match = self._running_set.make_room(job, match)
            try:
                copies += self._running_set.begin(job, match, load)
            except KVCacheFull:
                self._nobody_at = self._running_set.changes
                break
            self._queues.remove(job)
            job.has_awaited_images = False
            self.count -= 1
            self._num_pooling -= job.is_pooling
            self._shares.begin(job)
            self._queues.reorder_client(job.client)
            self._release_load(job)
            if job.fork_of is not None:
                job.cached = job.fork_of.cached
            elif not job.generation:
                job.cached = job.num_computed_tokens
                self.prompt_tokens += job.prompt_length
                self.cached_tokens += job.cached
                if match is not None:
                    job.cached_chain = match.chain
                    in_memory = len(match.entries) * self._running_set.cache.block_size
                    job.loaded = 0 if load is None else job.cached - in_memory
            self._in_flight_prefixes.claim(job)
        return copies

    def _find_candidate(self) -> AdmissionCandidate | None:
        """Return the first job that can begin now; None if none can."""
        running_set = self._running_set
        if not self.count or self._nobody_at == running_set.changes:
            return None
        if running_set.rows >= running_set.backoff.rows and not self._num_pooling:
            return None
        try:
            return self._search_queues()
        finally:
            self._queues.bring_back()

    def _search_queues(self) -> AdmissionCandidate | None:
        """Return the first job that can begin, by the clients' turns, or None. Park those that wait for something."""
        running_set, client_tokens = self._running_set, self._reachable_tokens_by_client()
        looks_by_client: Counter[Client] = Counter()
        token_limit, num_too_large, num_passed = math.inf, 0, 0
        obtainable_blocks: list[int] = []
        self._settle_accounts()
        while (job := self._queues.first) is not None and self._shares.tokens(job.client) <= token_limit:
            if not running_set.has_place_for(job):
                num_passed += 1
                if num_passed == _MAX_PASSED:
                    break
                self._queues.pass_over(job.client)
                continue
            if not self._is_within_limit(job, client_tokens):
                self._queues.pass_over(job.client)
                continue
            if looks_by_client[job.client] == _MAX_LOOKS and running_set.jobs:
                self._queues.pass_over(job.client)
                continue
            if num_too_large >= _MAX_TOO_LARGE and not running_set.fits_uncached(job, obtainable_blocks):
                num_too_large += 1
                if num_too_large == _MAX_PASSED:
                    break
                self._queues.pass_over(job.client)
                continue
            looks_by_client[job.client] += 1
            match = running_set.match(job)
            wait_target: WaitTarget | None = job.fork_of if _waits_for_parent(job) else self._block_to_await(job, match)
            if wait_target is not None:
                self._queues.remove(job)
                self._park(job, wait_target)
                if isinstance(wait_target, Key) and running_set.cache.states.has_states:
                    job.has_awaited_state = True
                    self._in_flight_prefixes.keep_state(wait_target)
            elif not running_set.fits(job, match):
                token_limit = min(token_limit, self._shares.tokens(job.client) + tokens_to_begin(job))
                num_too_large += 1
                obtainable_blocks = obtainable_blocks or running_set.obtainable_blocks
                self._queues.pass_over(job.client)
            else:
                load = self._find_load(job, match)
                is_read = load is None or load.pieces is not None
                wait_target = self._image_to_await(job, match, load) if is_read else load
                if wait_target is None:
                    return job, match, load
                self._queues.remove(job)
                self._park(job, wait_target)
        if _MAX_LOOKS not in looks_by_client.values():
            self._nobody_at = running_set.changes
        return None

    def _settle_accounts(self) -> None:
        """Charge the clients for what their running jobs have generated."""
        for job in self._running_set.jobs:
            if self._shares.settle(job):
                self._queues.reorder_client(job.client)

    def _block_to_await(self, job: Job, match: PrefixMatch | None) -> Key | None:
        """Return the block of another job that a job should wait for; None if it should not wait.

        With recurrent states a job waits only once: the state may have been dropped, and all jobs that wait for it
        would begin one after the other.
        """
        snapshots = self._running_set.cache.states.snapshots
        is_futile = snapshots is not None and (job.has_awaited_state or not snapshots.max_snapshots)
        return None if match is None or is_futile else self._in_flight_prefixes.block_to_await(job, match)

    def _image_to_await(self, job: Job, match: PrefixMatch | None, load: DiskLoad | None) -> PreparedImage | None:
        """Return the image that a job should wait for; None if it should not wait. Cached tokens of an image need no
        features. A job waits once: if features are dropped again, it halts where it needs them.
        """
        images = job.request.images
        if images is None or job.has_awaited_images or self._running_set.parent_to_fork(job) is not None:
            return None
        block_size = self._running_set.cache.block_size
        cached = 0 if match is None else match.matched_tokens(block_size)
        if load is not None:
            cached = max(cached, load.blocks_after_load * block_size)
        job.has_awaited_images = True
        return self.request_features([span.image for span in images.spans if span.end > cached])

    def _find_load(self, job: Job, match: PrefixMatch | None) -> DiskLoad | None:
        """Return the disk load that continues a match, finished or not; None if there is none, or for a fork."""
        if self._running_set.parent_to_fork(job) is not None:
            return None
        return self._disk_loads.load_for(job, match, self._cost_model.seconds_per_token)

    def _release_load(self, job: Job) -> None:
        """Release a job's disk load, and wake the jobs that wait for the same load."""
        load = self._disk_loads.release(job)
        if load is not None:
            self._wake([load])

    def _park(self, job: Job, wait_target: WaitTarget) -> None:
        """Let a job that is out of its queue wait for `wait_target`: a block, a disk load, an image or its parent."""
        self._waits_for[job] = wait_target
        self._parked_jobs.setdefault(wait_target, {})[job] = None

    def _wake(self, wait_targets: Iterable[WaitTarget]) -> None:
        """Put the jobs that wait for any of these things back into their queues."""
        for wait_target in wait_targets:
            for job in self._parked_jobs.pop(wait_target, ()):
                del self._waits_for[job]
                self._queues.add(job)
        self._nobody_at = _NEVER

    def _reachable_tokens_by_client(self) -> dict[str, int]:
        """Return by client how many tokens its running jobs may reach together, prompts and answers."""
        tokens: dict[str, int] = {}
        for job in self._running_set.jobs if self.client_tokens is not None else ():
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
    """The prompt blocks that running jobs *claim*, because the jobs compute them and have not stored them yet. A job
    that would compute the same blocks may wait for them.

    Waiting saves the shared tokens and costs a step, since the row is empty meanwhile. A step has a price whatever it
    computes, because it reads all weights. So a job waits if that saves it at least `worth_waiting` tokens, which cost
    as much. The bar is low on purpose: all waiting jobs together pay for one step, and each of them saves the tokens.
    """

    def __init__(self, block_size: int, worth_waiting: int) -> None:
        self._block_size = block_size
        self._worth_waiting = max(1, worth_waiting)
        self._owners: dict[Key, Job] = {}
        self._first_claimed: dict[Job, int] = {}  # the index of the first block that a job still claims

    def __contains__(self, key: Key) -> bool:
        return key in self._owners

    @property
    def owners(self) -> set[Job]:
        """The jobs that claim blocks."""
        return {*self._owners.values(), *self._first_claimed}

    def claim(self, job: Job) -> None:
        """Claim the uncached blocks of a prompt that a job begins to compute."""
        self._first_claimed[job] = job.num_computed_tokens // self._block_size
        for key in job.keys[self._first_claimed[job] :]:
            self._owners.setdefault(key, job)

    def release(self, job: Job, stored_blocks: int | None = None) -> list[Key]:
        """Release a job's claims to its first `stored_blocks` blocks (None: all). Return the keys that it gives up."""
        first_claimed = self._first_claimed.pop(job, len(job.keys))
        if stored_blocks is not None and stored_blocks < len(job.keys):
            self._first_claimed[job] = stored_blocks
        freed_keys = [key for key in job.keys[first_claimed:stored_blocks] if self._owners.get(key) is job]
        for key in freed_keys:
            self._owners.pop(key, None)
        return freed_keys

    def block_to_await(self, job: Job, match: PrefixMatch) -> Key | None:
        """Return the last block after `match` that another job computes too; None if `job` should not wait for it."""
        begin = len(match.entries)
        owner = self._owners.get(job.keys[begin]) if begin < len(job.keys) else None
        if owner is None:
            return None
        common_range = range(min(len(job.keys), len(owner.keys)))
        end = bisect_left(common_range, True, lo=begin + 1, key=lambda i: job.keys[i] != owner.keys[i])
        shared = min(end * self._block_size, job.num_reusable_tokens)
        if shared - begin * self._block_size - match.partial_tokens < self._worth_waiting:
            return None
        last = job.keys[end - 1]
        return last if last in self._owners else job.keys[begin]

    def keep_state(self, block: Key) -> None:
        """Have the job that computes a claimed block keep the recurrent state after the block."""
        if (owner := self._owners.get(block)) is not None:
            owner.snapshot_positions.add((owner.keys.index(block) + 1) * self._block_size)

    def clear(self) -> None:
        """Drop all claims."""
        self._owners.clear()
        self._first_claimed.clear()
