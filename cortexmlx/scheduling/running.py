"""The running set: the jobs that have a row, and the blocks they hold. Without mlx."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cortexmlx.disk.tier import DiskLoad, PieceLoad
from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import Key, Match, Salt
from cortexmlx.kv.snapshots import Save, whole_blocks
from cortexmlx.kv.step import BlockCopy
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.shortage import Backoff, fit
from cortexmlx.types.request import RequestState

_FIRST_SPARE = 256
"""How far before its end a prompt is first kept for texts that leave it there, in tokens."""


class RunningSet:
    """The running jobs, `jobs`, in the order in which they began: at most as many as `backoff` allows.

    A job gets room for `headroom` more tokens than it has, so that its answer stays in one run. With `share_prefixes`,
    other jobs can find what a job stores. `changes` grows whenever a row or blocks are given up or stored, so that a
    question about them need not be asked twice.
    """

    def __init__(self, cache: KVCache, backoff: Backoff, headroom: int, share_prefixes: bool) -> None:
        self.cache = cache
        self.backoff = backoff
        self.headroom = headroom
        self.share_prefixes = share_prefixes
        self.jobs: list[Job] = []
        self.changes = 0
        self.outgrown = False
        """Whether a job has come to the end of a cache that may not grow."""
        self._texts = self._text_tokens = 0
        """How many of the jobs end with their prompts, and how many tokens of those are not computed yet."""
        self._turns = 0
        self._loads: list[PieceLoad] = []

    @property
    def prefilling(self) -> bool:
        """Whether the prompt of a row is not computed yet."""
        return RequestState.PREFILLING in [job.state for job in self.jobs]

    @property
    def dropping(self) -> list[Job]:
        """The rows that must drop tokens before their next one, in order."""
        return sorted((job for job in self.jobs if job.must_drop), key=lambda j: j.order)

    @property
    def in_order(self) -> list[Job]:
        """The running jobs in the order of their turns. Within a client, its turns go to its jobs by priority and
        age.
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
        """The job that loses its row next. Of the clients with several rows, the one that uses most tokens loses its
        last row. If every client has one row, the job that began last loses it.
        """
        rows: dict[str | None, list[Job]] = {}
        for job in self.in_order:
            rows.setdefault(job.client, []).append(job)
        several = [own for own in rows.values() if len(own) > 1]
        return max(several or [self.in_order], key=lambda own: sum(len(job.tokens) for job in own))[-1]

    def keys(self, tokens: Sequence[int], salt: Salt, shared: bool = True) -> list[Key]:
        """Return the keys of the full blocks of `tokens` in the prefix cache; none if they are not shared."""
        return self.cache.prefix.keys(tokens, salt) if self.share_prefixes and shared else []

    def keys_of(self, job: Job) -> list[Key]:
        """Return the keys of the full blocks of a job's tokens that it may share."""
        return self.keys(job.tokens[: job.num_sharable(len(job.tokens))], job.chain, job.request.cache)

    def shares(self, job: Job) -> bool:
        """Return whether a job may begin with what other jobs stored, and other jobs with what it stores."""
        return self.share_prefixes and job.request.cache

    @property
    def rows(self) -> int:
        """How many jobs have a row: all but those that end with their prompt."""
        return len(self.jobs) - self._texts

    def has_place_for(self, job: Job) -> bool:
        """Return whether a job of this kind may begin: there is a row, or, for one that ends with its prompt, the next
        step has room for its tokens. While steps are kept small, all jobs count as rows.
        """
        if self.backoff.holds_back:
            return len(self.jobs) < self.backoff.rows
        if not job.pools:
            return self.rows < self.backoff.rows
        return self._text_tokens < self.backoff.tokens

    def check_invariants(self) -> None:
        """Raise AssertionError if the counts of jobs that end with their prompts are wrong."""
        texts = [job for job in self.jobs if job.pools]
        assert self._texts == len(texts), "the count of texts is wrong"
        assert self._text_tokens == sum(map(_missing, texts)), "the count of the tokens of texts is wrong"

    def begin_keys(self, job: Job) -> list[Key]:
        """Return the `keys` of a new job's prompt. A fork takes those of its parent, as far as the parent still has the
        prompt.
        """
        parent = job.fork_of
        if parent is None or parent.drops:
            return self.keys_of(job)
        return parent.keys[: len(job.tokens) // self.cache.block_size]  # one that was preempted knows more

    def match(self, job: Job) -> Match | None:
        """Return the cached beginning of a job's tokens, which need not be computed. None if the job may not look for
        one.
        """
        if not self.shares(job):
            return None
        return self.cache.match(job.tokens, job.keys, job.num_reusable_tokens, job.chain)

    def fits(self, job: Job, match: Match | None) -> bool:
        """Return whether there are blocks for a job and one more for every row, if headroom is dropped and the sources
        of copies are let go. The first row always fits.
        """
        if not self.jobs:
            return True
        need, tables = self._blocks_needed(job, match), self.cache.tables
        if tables.can_obtain(need, None, job.pools):
            return True
        return tables.can_obtain(need, {row.id: row.reserved for row in self.jobs}, job.pools)

    @property
    def room(self) -> list[int]:
        """Blocks of each layer group that a job may need to begin now, if headroom is dropped."""
        blocks = self.cache.tables.obtainable_beside({row.id: row.reserved for row in self.jobs})
        return [count - self.rows for count in blocks]

    def fits_uncached(self, job: Job, room: list[int]) -> bool:
        """Return whether a job fits into `room` without any cached block. The prefix cache is not looked at."""
        needed = self.cache.blocks_needed(len(job.tokens), None)
        return not self.jobs or all(count <= most for count, most in zip(needed, room, strict=True))

    def make_room(self, job: Job, match: Match | None) -> Match | None:
        """Drop headroom if a job that fits needs it. Return what is cached of the job then.

        A job that ends with its prompt evicts nothing of chats, unless no other job runs: then the system has taken
        memory away, and the job could never begin.
        """
        if self.cache.tables.can_obtain(self._blocks_needed(job, match), None, job.pools):
            return match
        self.drop_headroom()
        evicted = False
        while not self.jobs and job.pools and self._lacks_blocks(job, match) and self.cache.pools.drop_cached(1):
            evicted, match = True, None  # it may be what was evicted
        return self.match(job) if evicted else match

    def _lacks_blocks(self, job: Job, match: Match | None) -> bool:
        return not self.cache.tables.can_obtain(self._blocks_needed(job, match), None, job.pools)

    def _blocks_needed(self, job: Job, match: Match | None) -> list[int]:
        return [count + self.rows for count in self.cache.blocks_needed(len(job.tokens), match)]

    def begin(self, job: Job, match: Match | None, load: DiskLoad | None = None) -> tuple[BlockCopy, ...]:
        """Give a job a row and blocks for its tokens, and return the block copies that this takes.

        The job begins with the blocks of `match`, and of the disk `load` after its whole blocks, or with those of the
        job that it forks. Raises KVCacheFull; then nothing has changed.
        """
        if load is not None and match is not None:
            match = whole_blocks(match)
        parent = self.parent_to_fork(job)
        if parent is None:
            headroom = min(self.headroom, max(0, job.max_new_tokens - job.generated))
            copies = self.cache.allocate_for(job.id, len(job.tokens), headroom, match, load, job.pools)
            if load is not None:
                self._loads += self.cache.load(job.id, load, job.tokens, job.keys)
        else:
            copies = self._fork(job, parent)
        self.jobs.append(job)
        if not job.turn:
            self._turns += 1
            job.turn = self._turns
        job.state = RequestState.PREFILLING
        job.num_planned_outputs, job.reserved = job.generated, len(job.tokens)
        job.num_computed_tokens = job.num_stored_tokens = self.cache.tables.length(job.id)
        if job.pools:
            self._texts += 1
            self._text_tokens += _missing(job)
        self._enter(job, match)
        return copies

    def take_loads(self) -> tuple[PieceLoad, ...]:
        """Return the pieces to load from disk for the jobs that began since the last call."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def parent_to_fork(self, job: Job) -> Job | None:
        """Return the job whose blocks a fork begins with. None if the job is no fork, or begins as any other job."""
        parent = job.fork_of
        if parent is None or job.generated or not can_fork(job):
            return None
        return parent if self.cache.can_fork(parent.id, job.prompt_kept - 1) else None

    def _enter(self, job: Job, match: Match | None) -> None:
        """Begin with a job's recurrent state. It is to be kept where other jobs will begin: before the last token of
        the prompt, before the thoughts that it opens, and where the prompt leaves what was cached before. Windows are
        kept at the same places.
        """
        job.row, job.state_at = (job.id, job.generation), 0
        self.cache.states.enter(job.row, job.id)
        shared, forked = self.shares(job), max(job.params.n, job.params.best_of or 1) > 1
        again, next_turn = job.prompt_kept - 1, job.prompt_kept - max(job.request.tail, 1)
        wanted = {again, next_turn, self._anchor(job)} if shared else {again} if forked else set()
        if shared and self.cache.disk_tier is not None:  # where a text begins in whole blocks, as those stored
            wanted |= {next_turn // self.cache.block_size * self.cache.block_size}
        if match is not None:
            self.cache.continue_text(match, self._anchor(job))
        job.cuts = {place for place in wanted | {match.chain if match else 0} if place > job.num_computed_tokens}
        job.spare_cuts = self._spare_cuts(job) - job.cuts if shared and not job.pools else set()

    def _spare_cuts(self, job: Job) -> set[int]:
        """Return places within a prompt, each twice as far from its end as the one after it. A later prompt that is
        different near its end, such as one with one more tool, then computes at most twice what is new. Wide windows
        take much memory, so there are fewer places: four times as far, and four times as much.
        """
        windows = [group.spec.window or 0 for group in self.cache.groups]
        first, ratio = (_FIRST_SPARE, 2) if max(windows) <= _FIRST_SPARE else (4 * max(windows), 4)
        size, end, places, distance = self.cache.block_size, job.prompt_kept, set(), first
        while end - distance >= job.num_computed_tokens + first:
            places.add((end - distance) // size * size)
            distance *= ratio
        return places

    def _anchor(self, job: Job) -> int:
        """Return where the next turn parts from this one; 0 if that is not known, or if earlier tokens were dropped."""
        return job.request.anchor if job.prompt_kept == job.prompt_length else 0

    def _use_anchor(self, job: Job) -> None:
        """Keep the state where the next turn parts from this one longer than those of the rounds after it."""
        anchor = self._anchor(job)
        if 0 < anchor <= job.num_computed_tokens:
            self.cache.states.use(job.id, anchor)

    def cuts(self, scheduled: Iterable[tuple[Job, int]]) -> tuple[Save, ...]:
        """Return the states to keep within a step that computes the `scheduled` tokens."""
        cuts = []
        for job, count in scheduled if self.cache.states.snapshots is not None else ():
            end = job.num_computed_tokens + count
            every = (*job.cuts, *job.spare_cuts)
            for place in sorted(place for place in every if job.num_computed_tokens < place <= end):
                snapshot = self.cache.states.make(job.id, place, place in job.spare_cuts)
                if snapshot is not None:
                    cuts.append(Save(job.row, place, snapshot))
                    self._use_anchor(job)
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
        """Make room for `tokens` tokens of a running job, and drop headroom if there is too little.

        If the system refuses memory, the job gets what the cache can have, and ends there. Return False if another row
        must go first. Raises KVCacheFull if there is no other row.
        """
        if tokens > self.cache.tables.capacity_tokens:
            self.cache.pools.look_again()
        while True:
            capacity = self.cache.tables.capacity_tokens
            if tokens > capacity:
                fit(job, capacity)
                tokens, self.outgrown = capacity, True
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
        """Free the blocks that running jobs have beyond what was promised to them. Return how many these were."""
        return sum(self.cache.give_back(job.id, job.reserved) for job in self.jobs)

    @property
    def drafted(self) -> bool:
        """Whether a row has drafted tokens to verify, or a step in flight verifies some."""
        return any(job.verifying or (job.drafts and job.can_decode) for job in self.jobs)

    def store(self, job: Job, tokens: int) -> None:
        """Note that the job's first `tokens` tokens are in the arena, or will be before anyone reads them."""
        before = job.num_stored_tokens
        self._text_tokens -= tokens - before if job.pools else 0
        job.num_stored_tokens = tokens
        if self.shares(job):
            stored = job.num_sharable(min(tokens, len(job.tokens)))
            self.cache.register(job.id, job.tokens, stored, job.keys)
            for place in sorted(p for p in (*job.spare_cuts, *job.cuts) if before < p <= stored):
                self.cache.keep_window(job.id, place, place in job.spare_cuts)
        self.changes += 1

    def keeps_all_of(self, job: Job) -> bool:
        """Return whether the newest tokens of a job that has ended are to be cached, too: if it finished well.

        Other jobs can also begin with the older tokens of a cancelled job. But if a text can only continue at the end
        of another, they need its newest tokens.
        """
        well = job.state is RequestState.FINISHED
        cut_short = job.state is RequestState.CANCELLED and self.cache.needs_ends
        return self.shares(job) and (well or cut_short)

    def release_row(self, job: Job) -> None:
        """Free a job's row, but not its blocks."""
        self.jobs.remove(job)
        if job.pools:
            self._texts -= 1
            self._text_tokens -= _missing(job)
        self.changes += 1

    def release_blocks(self, job: Job) -> None:
        """Give up the blocks of a job that has left. What it stored stays cached, with its newest state within that.

        If the job continues with a part of its text, the cached whole text is evicted first.
        """
        stored = job.num_sharable(min(job.num_stored_tokens, len(job.tokens))) if self.shares(job) else 0
        if job.verifying:  # it is not known whether the block with the drafts can be used: see `drafts.verify`
            stored -= stored % self.cache.block_size
        self.cache.states.leave(job.row, job.id, job.state_at if job.state_at <= stored else 0)
        if self.shares(job):
            self.cache.release_blocks(job.id, job.tokens, stored, job.keys, passed=job.must_drop)
        else:
            self.cache.free(job.id)
        self.changes += 1


def _missing(job: Job) -> int:
    """Return how many tokens of a text are not in the arena yet."""
    return len(job.tokens) - job.num_stored_tokens


def can_fork(job: Job) -> bool:
    """Return whether the parent of a fork has its prompt in the arena, except for the last token."""
    parent = job.fork_of
    return (
        parent is not None
        and parent.state is RequestState.DECODING
        and not parent.drops
        and parent.num_stored_tokens >= job.prompt_kept - 1
    )
