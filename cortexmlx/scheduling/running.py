"""The running set: the jobs that have a row, and the blocks they hold. No mlx."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.disk_tier import DiskLoad, PieceLoad
from cortexmlx.kv.prefix import Key, Match
from cortexmlx.kv.state.resume_points import whole_blocks
from cortexmlx.kv.state.snapshots import Save
from cortexmlx.kv.step import BlockCopy
from cortexmlx.request import RequestState
from cortexmlx.scheduling.backoff import Backoff
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.shortage import fit


class RunningSet:
    """The running jobs, `jobs`, in the order in which they began: at most as many as the `backoff` lets.

    `headroom` tokens are asked for beyond a job's tokens, so that its answer stays in one run. With `share_prefixes`,
    what a job stores can be found by others. `changes` goes up whenever a row or blocks are given up or stored, so
    that a question about them need not be asked twice.
    """

    def __init__(self, cache: KVCache, backoff: Backoff, headroom: int, share_prefixes: bool) -> None:
        self.cache = cache
        self.backoff = backoff
        self.headroom = headroom
        self.share_prefixes = share_prefixes
        self.jobs: list[Job] = []
        self.changes = 0
        self._turns = 0
        self._loads: list[PieceLoad] = []

    @property
    def prefilling(self) -> bool:
        """Some row's prompt is not computed yet."""
        return any(j.state is RequestState.PREFILLING for j in self.jobs)

    @property
    def dropping(self) -> list[Job]:
        """The rows that must drop tokens before their next one, in order."""
        return sorted((job for job in self.jobs if job.must_drop), key=lambda j: j.order)

    @property
    def in_order(self) -> list[Job]:
        """The running jobs, those that come first before the others: by the turns in which they began, but a client's
        own turns go to its jobs by priority and age.
        """
        ordered = sorted(self.jobs, key=lambda j: j.order)
        turns: dict[str | None, list[int]] = {}
        for job in self.jobs:
            turns.setdefault(job.client, []).append(job.turn)
        if len(turns) == 1:
            return ordered
        for own in turns.values():
            own.sort(reverse=True)
        return [job for _, job in sorted(((turns[job.client].pop(), job) for job in ordered), key=lambda pair: pair[0])]

    @property
    def victim(self) -> Job:
        """Who loses its row first. Of the clients with several rows the one that uses the most tokens loses its last
        one; if all have one, the row that began last goes.
        """
        rows: dict[str | None, list[Job]] = {}
        for job in self.in_order:
            rows.setdefault(job.client, []).append(job)
        several = [own for own in rows.values() if len(own) > 1]
        return max(several or [self.in_order], key=lambda own: sum(len(job.tokens) for job in own))[-1]

    def keys(self, tokens: Sequence[int], salt: str | None, shared: bool = True) -> list[Key]:
        """What the full blocks of `tokens` are called in the prefix cache; none if they are not shared."""
        return self.cache.prefix.keys(tokens, salt) if self.share_prefixes and shared else []

    def shares(self, job: Job) -> bool:
        """Whether a job may begin with what others stored, and others with what it stores."""
        return self.share_prefixes and job.request.cache

    def begin_keys(self, job: Job) -> list[Key]:
        """`keys` of a new job's prompt: those of the job that it forks, as far as that has the prompt still."""
        parent = job.fork_of
        if parent is None or parent.drops:
            return self.keys(job.tokens, job.salt, job.request.cache)
        return parent.keys[: len(job.tokens) // self.cache.block_size]  # one that was preempted knows more

    def match(self, job: Job) -> Match | None:
        """What of a job's tokens is cached and need not be computed; None if it is not to look."""
        if not self.shares(job):
            return None
        return self.cache.match(job.tokens, job.keys, job.num_reusable_tokens, job.salt)

    def fits(self, job: Job, match: Match | None) -> bool:
        """Whether there are blocks for a job and one more for every row, if headroom is dropped. The first row always
        fits.
        """
        if not self.jobs:
            return True
        need = self._blocks_needed(job, match)
        tables = self.cache.tables
        return tables.can_obtain(need) or tables.can_obtain(need, {row.id: row.reserved for row in self.jobs})

    @property
    def room(self) -> list[int]:
        """Blocks of each layer group that a job may need to begin now, if headroom is dropped."""
        blocks = self.cache.tables.obtainable_beside({row.id: row.reserved for row in self.jobs})
        return [count - len(self.jobs) for count in blocks]

    def fits_uncached(self, job: Job, room: list[int]) -> bool:
        """Whether a job fits into `room` even if nothing of it is cached. It takes no look at the prefix cache."""
        needed = self.cache.blocks_needed(len(job.tokens), None)
        return not self.jobs or all(count <= most for count, most in zip(needed, room, strict=True))

    def make_room(self, job: Job, match: Match | None) -> None:
        """Drop headroom, if a job that fits needs it."""
        if not self.cache.tables.can_obtain(self._blocks_needed(job, match)):
            self.drop_headroom()

    def _blocks_needed(self, job: Job, match: Match | None) -> list[int]:
        return [count + len(self.jobs) for count in self.cache.blocks_needed(len(job.tokens), match)]

    def begin(self, job: Job, match: Match | None, load: DiskLoad | None = None) -> tuple[BlockCopy, ...]:
        """Give a job a row and blocks for its tokens: those of `match`, after its whole blocks those of a disk
        `load`, or those of the job that it forks. Return the block copies that this takes. Raises KVCacheFull;
        then nothing changed.
        """
        if load is not None and match is not None:
            match = whole_blocks(match)
        if job.fork_of is None or job.generated or not self._can_fork(job):
            headroom = min(self.headroom, max(0, job.max_new_tokens - job.generated))
            copies = self.cache.allocate_for(job.id, len(job.tokens), headroom, match, load)
            if load is not None:
                self._loads += self.cache.load(job.id, load, job.tokens, job.keys)
        else:
            copies = self._fork(job, job.fork_of)
        self.jobs.append(job)
        if not job.turn:
            self._turns += 1
            job.turn = self._turns
        job.state = RequestState.PREFILLING
        job.num_planned_outputs, job.reserved = job.generated, len(job.tokens)
        job.num_computed_tokens = job.num_stored_tokens = self.cache.tables.length(job.id)
        self._enter(job, match)
        return copies

    def take_loads(self) -> tuple[PieceLoad, ...]:
        """What the jobs that began bring from the tier below, since it was asked last."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def _can_fork(self, job: Job) -> bool:
        parent = job.fork_of
        if parent is None or not can_fork(job):
            return False
        return self.cache.can_fork(parent.id, job.prompt_kept - 1)

    def _enter(self, job: Job, match: Match | None) -> None:
        """A job's recurrent state is that of what it begins with. It is to be kept where others will begin: before the
        last token of the prompt, and where the prompt leaves what was cached before.
        """
        job.row, job.state_at = (job.id, job.generation), 0
        self.cache.states.enter(job.row, job.id)
        forked = max(job.params.n, job.params.best_of or 1) > 1
        wanted = {job.prompt_kept - 1} if self.shares(job) or forked else set()
        if self.cache.disk_tier is not None and self.shares(
            job
        ):  # where a text begins in whole blocks, as those stored
            wanted |= {(job.prompt_kept - 1) // self.cache.block_size * self.cache.block_size}
        job.cuts = {place for place in wanted | {match.chain if match else 0} if place > job.num_computed_tokens}

    def cuts(self, scheduled: Iterable[tuple[Job, int]]) -> tuple[Save, ...]:
        """The states to keep on the way of a step that computes the `scheduled` tokens."""
        cuts = []
        for job, count in scheduled if self.cache.states.snapshots is not None else ():
            end = job.num_computed_tokens + count
            for place in sorted(place for place in job.cuts if job.num_computed_tokens < place <= end):
                snapshot = self.cache.states.make(job.id, place)
                if snapshot is not None:
                    cuts.append(Save(job.row, place, snapshot))
        return tuple(cuts)

    def _fork(self, job: Job, parent: Job) -> tuple[BlockCopy, ...]:
        copies = self.cache.fork(parent.id, job.id, job.prompt_kept - 1)
        try:
            self.cache.reserve(job.id, len(job.tokens))
        except KVCacheFull:
            self.cache.free(job.id)
            raise
        return copies

    def reserve(self, job: Job, tokens: int) -> bool:
        """Make room for `tokens` tokens of a running job, dropping headroom if there is too little. If the system
        refuses memory, the job gets what the cache can have, and ends there. False if another row must go first;
        raises KVCacheFull if there is none.
        """
        while True:
            capacity = self.cache.tables.capacity_tokens
            if tokens > capacity:
                fit(job, capacity)
                tokens = capacity
            job.reserved = max(job.reserved, tokens)
            try:
                self.cache.reserve(job.id, tokens)
                return True
            except KVCacheFull:
                if self.cache.tables.capacity_tokens < capacity or self.drop_headroom():
                    continue
                if len(self.jobs) == 1:
                    raise
                return False

    def drop_headroom(self) -> int:
        """Free the blocks that running jobs have beyond what was promised to them. Returns how many those were."""
        return sum(self.cache.give_back(job.id, job.reserved) for job in self.jobs)

    @property
    def drafted(self) -> bool:
        """Some row has drafted tokens to verify, or a step in flight verifies them."""
        return any(job.verifying or (job.drafts and job.can_decode) for job in self.jobs)

    def store(self, job: Job, tokens: int) -> None:
        """The job's first `tokens` tokens are in the arena by the time anyone reads them."""
        job.num_stored_tokens = tokens
        if self.shares(job):
            self.cache.register(job.id, job.tokens, min(tokens, len(job.tokens)), job.keys)
        self.changes += 1

    def keeps_all_of(self, job: Job) -> bool:
        """Whether the newest tokens of a job that has ended are to be cached, too: if it finished well. If it was
        cancelled, others can begin with the older ones as well, but not where they need its end.
        """
        well = job.state is RequestState.FINISHED
        cut_short = job.state is RequestState.CANCELLED and self.cache.needs_ends
        return self.shares(job) and (well or cut_short)

    def release_row(self, job: Job) -> None:
        """Free a job's row, but not its blocks."""
        self.jobs.remove(job)
        self.changes += 1

    def release_blocks(self, job: Job) -> None:
        """Give up the blocks of a job that has left; what it stored stays cached, and its newest state within that. If
        it goes on with a part of its text, the whole is the first to be evicted.
        """
        stored = min(job.num_stored_tokens, len(job.tokens)) if self.shares(job) else 0
        self.cache.states.leave(job.row, job.id, job.state_at if job.state_at <= stored else 0)
        if self.shares(job):
            self.cache.release_blocks(job.id, job.tokens, stored, job.keys, passed=job.must_drop)
        else:
            self.cache.free(job.id)
        self.changes += 1


def can_fork(job: Job) -> bool:
    """Whether the job that this one forks has its prompt in the arena, but for the last token."""
    parent = job.fork_of
    return (
        parent is not None
        and parent.state is RequestState.DECODING
        and not parent.drops
        and parent.num_stored_tokens >= job.prompt_kept - 1
    )
