"""The running set: the jobs that have a row, and the blocks they hold. Without mlx."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cortexmlx.disk.tier import DiskLoad, PieceLoad
from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import Key, PrefixMatch, Salt
from cortexmlx.kv.snapshots import RowSnapshot, drop_partial_block
from cortexmlx.kv.step import BlockCopy
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.shortage import Backoff, limit_answer
from cortexmlx.types.request import RequestState

_FIRST_SPARE_DISTANCE = 256
"""How far before its end a prompt is first kept for texts that leave it there, in tokens."""


class RunningSet:
    """The running jobs, `jobs`, in the order in which they began, and their blocks. `backoff` says how many may
    have a row.

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
        self.has_outgrown_cache = False
        """Whether a job has come to the end of a cache that may not grow."""
        self._texts = self._text_tokens = 0
        """How many of the jobs end with their prompts, and how many tokens of those are not computed yet."""
        self._num_started = 0
        self._loads: list[PieceLoad] = []

    @property
    def is_prefilling(self) -> bool:
        """Whether some row's prompt is not fully computed yet."""
        return RequestState.PREFILLING in [job.state for job in self.jobs]

    @property
    def jobs_to_shorten(self) -> list[Job]:
        """The rows that must drop tokens before their next one, in order."""
        return sorted((job for job in self.jobs if job.must_drop_tokens), key=lambda j: j.order)

    @property
    def jobs_by_start(self) -> list[Job]:
        """The running jobs in the order in which they got rows, but those of one client by priority and age."""
        jobs_by_order = sorted(self.jobs, key=lambda j: j.order)
        starts: dict[str | None, list[int]] = {}
        for job in self.jobs:
            starts.setdefault(job.client, []).append(job.start_number)
        if len(starts) == 1:
            return jobs_by_order
        for client_starts in starts.values():
            client_starts.sort(reverse=True)
        return [
            job
            for _, job in sorted(((starts[job.client].pop(), job) for job in jobs_by_order), key=lambda pair: pair[0])
        ]

    @property
    def victim(self) -> Job:
        """The job to preempt next. Of the clients with several rows, the one that uses most tokens loses its last row.
        If every client has one row, the job that began last loses its row.
        """
        jobs_by_client: dict[str | None, list[Job]] = {}
        for job in self.jobs_by_start:
            jobs_by_client.setdefault(job.client, []).append(job)
        candidates = [client_jobs for client_jobs in jobs_by_client.values() if len(client_jobs) > 1]
        return max(candidates or [self.jobs_by_start], key=lambda own: sum(len(job.tokens) for job in own))[-1]

    def compute_keys(self, tokens: Sequence[int], salt: Salt, shared: bool = True) -> list[Key]:
        """Return the prefix cache's keys of the full blocks of `tokens`; no keys if the blocks are not shared."""
        return self.cache.prefix.keys(tokens, salt) if self.share_prefixes and shared else []

    def compute_job_keys(self, job: Job) -> list[Key]:
        """Return the prefix-cache keys of those of a job's full blocks that it may share."""
        return self.compute_keys(job.tokens[: job.num_sharable(len(job.tokens))], job.block_salt, job.request.cache)

    def shares_prefix(self, job: Job) -> bool:
        """Return whether a job uses cached blocks of other jobs, and they its own."""
        return self.share_prefixes and job.request.cache

    @property
    def rows(self) -> int:
        """How many running jobs have a row: all but the pooling ones, which end with their prompt."""
        return len(self.jobs) - self._texts

    def has_place_for(self, job: Job) -> bool:
        """Return whether a row is free for a job. A pooling job needs no row, but room in the tokens of the next step.
        While steps are kept small, all jobs count as rows.
        """
        if self.backoff.holds_back:
            return len(self.jobs) < self.backoff.rows
        if not job.is_pooling:
            return self.rows < self.backoff.rows
        return self._text_tokens < self.backoff.tokens

    def check_invariants(self) -> None:
        """Raise AssertionError if the counts of pooling jobs and their tokens are wrong."""
        texts = [job for job in self.jobs if job.is_pooling]
        assert self._texts == len(texts), "the count of texts is wrong"
        assert self._text_tokens == sum(map(_missing_tokens, texts)), "the count of the tokens of texts is wrong"

    def initial_keys(self, job: Job) -> list[Key]:
        """Return the block keys of a new job's prompt. A fork takes its parent's, unless the parent dropped tokens."""
        parent = job.fork_of
        if parent is None or parent.drops:
            return self.compute_job_keys(job)
        return parent.keys[: len(job.tokens) // self.cache.block_size]  # one that was preempted knows more

    def match(self, job: Job) -> PrefixMatch | None:
        """Return the cached beginning of a job's text, which need not be computed; None if the job does not share."""
        if not self.shares_prefix(job):
            return None
        return self.cache.match(job.tokens, job.keys, job.num_reusable_tokens, job.block_salt)

    def fits(self, job: Job, match: PrefixMatch | None) -> bool:
        """Return whether there are blocks for a job and one more for every row, even if only after headroom is dropped
        and the sources of copies are released. The first row always fits.
        """
        if not self.jobs:
            return True
        need, tables = self._blocks_needed(job, match), self.cache.tables
        if tables.can_obtain(need, None, job.is_pooling):
            return True
        return tables.can_obtain(need, {row.id: row.reserved_tokens for row in self.jobs}, job.is_pooling)

    @property
    def obtainable_blocks(self) -> list[int]:
        """How many blocks of each layer group a new job can have now, if headroom is dropped."""
        blocks = self.cache.tables.obtainable_blocks({row.id: row.reserved_tokens for row in self.jobs})
        return [count - self.rows for count in blocks]

    def fits_uncached(self, job: Job, obtainable_blocks: list[int]) -> bool:
        """Return whether a job fits into `obtainable_blocks` blocks of each group, with the prefix cache ignored."""
        needed_blocks = self.cache.blocks_needed(len(job.tokens), None)
        return not self.jobs or all(
            count <= block_limit for count, block_limit in zip(needed_blocks, obtainable_blocks, strict=True)
        )

    def make_room(self, job: Job, match: PrefixMatch | None) -> PrefixMatch | None:
        """Drop headroom if a job that fits needs it. Return the job's match, a new one if cached blocks were evicted.

        A pooling job evicts nothing that other jobs have cached, unless none of them runs: then the system has taken
        memory away, and the job could never begin.
        """
        if self.cache.tables.can_obtain(self._blocks_needed(job, match), None, job.is_pooling):
            return match
        self.drop_headroom()
        has_evicted = False
        while not self.jobs and job.is_pooling and self._lacks_blocks(job, match) and self.cache.pools.drop_cached(1):
            has_evicted, match = True, None  # it may be what was evicted
        return self.match(job) if has_evicted else match

    def _lacks_blocks(self, job: Job, match: PrefixMatch | None) -> bool:
        """Return whether a job needs more blocks than it can get without dropping headroom."""
        return not self.cache.tables.can_obtain(self._blocks_needed(job, match), None, job.is_pooling)

    def _blocks_needed(self, job: Job, match: PrefixMatch | None) -> list[int]:
        """Return how many blocks of each group a job needs, and one more for each running row, since rows grow."""
        return [count + self.rows for count in self.cache.blocks_needed(len(job.tokens), match)]

    def begin(self, job: Job, match: PrefixMatch | None, load: DiskLoad | None = None) -> tuple[BlockCopy, ...]:
        """Give a job a row and blocks for its tokens. Return the block copies that this takes.

        The job begins with the blocks of `match`, and of the disk `load` after its whole blocks, or with those of the
        job that it forks. Raises KVCacheFull; then nothing has changed.
        """
        if load is not None and match is not None:
            match = drop_partial_block(match)
        parent = self.parent_to_fork(job)
        if parent is None:
            headroom = min(self.headroom, max(0, job.max_new_tokens - job.num_generated))
            copies = self.cache.allocate_for(job.id, len(job.tokens), headroom, match, load, job.is_pooling)
            if load is not None:
                self._loads += self.cache.cache_loaded_blocks(job.id, load, job.tokens, job.keys)
        else:
            copies = self._fork(job, parent)
        self.jobs.append(job)
        if not job.start_number:
            self._num_started += 1
            job.start_number = self._num_started
        job.state = RequestState.PREFILLING
        job.num_planned_outputs, job.reserved_tokens = job.num_generated, len(job.tokens)
        job.num_computed_tokens = job.num_stored_tokens = self.cache.tables.length(job.id)
        if job.is_pooling:
            self._texts += 1
            self._text_tokens += _missing_tokens(job)
        self._begin_state(job, match)
        return copies

    def take_loads(self) -> tuple[PieceLoad, ...]:
        """Return the pieces to load from disk for the jobs that began since the last call, and forget them."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def parent_to_fork(self, job: Job) -> Job | None:
        """Return the job whose blocks a new fork begins with; None if it begins as any other job."""
        parent = job.fork_of
        if parent is None or job.num_generated or not can_fork(job):
            return None
        return parent if self.cache.can_fork(parent.id, job.kept_prompt_length - 1) else None

    def _begin_state(self, job: Job, match: PrefixMatch | None) -> None:
        """Set up a job's recurrent state, and choose the positions in its prompt for snapshots, at which later jobs can
        begin: before the last token, before the thinking tags at its end, where the next turn's text differs, and where
        the cached prefix ended. What windows see is kept at the same positions. `release_blocks` makes the snapshot at
        the answer's end.
        """
        job.row, job.state_at = (job.id, job.generation), 0
        self.cache.states.begin_row(job.row, job.id)
        shared, has_forks = self.shares_prefix(job), max(job.params.n, job.params.best_of or 1) > 1
        repeat_position = job.kept_prompt_length - 1
        before_thoughts = job.kept_prompt_length - max(job.request.thinking_tag_length, 1)
        wanted_positions = (
            {repeat_position, before_thoughts, self._next_turn_anchor(job)}
            if shared
            else {repeat_position}
            if has_forks
            else set()
        )
        if shared and self.cache.disk_tier is not None:  # where a text begins in whole blocks, as those stored
            wanted_positions |= {before_thoughts // self.cache.block_size * self.cache.block_size}
        if match is not None:
            self.cache.reorder_resume_points(match, self._next_turn_anchor(job))
        job.snapshot_positions = {
            p for p in wanted_positions | {match.chain if match else 0} if p > job.num_computed_tokens
        }
        spare_positions = self._spare_snapshot_positions(job) if shared and not job.is_pooling else set[int]()
        job.spare_positions = spare_positions - job.snapshot_positions

    def _spare_snapshot_positions(self, job: Job) -> set[int]:
        """Return positions in a prompt for spare snapshots, each twice as far from its end as the next. A later prompt
        that differs near its end, such as one with one more tool, then computes at most twice what is new. With wide
        windows, which take much memory, it is four times as far, and at most four times as much.
        """
        windows = [group.spec.window or 0 for group in self.cache.groups]
        first, ratio = (_FIRST_SPARE_DISTANCE, 2) if max(windows) <= _FIRST_SPARE_DISTANCE else (4 * max(windows), 4)
        size, end, positions, distance = self.cache.block_size, job.kept_prompt_length, set(), first
        while end - distance >= job.num_computed_tokens + first:
            positions.add((end - distance) // size * size)
            distance *= ratio
        return positions

    def _next_turn_anchor(self, job: Job) -> int:
        """Return how many prompt tokens the next turn will keep; 0 if that is unknown, or if tokens were dropped."""
        return job.request.anchor_length if job.kept_prompt_length == job.prompt_length else 0

    def _use_anchor(self, job: Job) -> None:
        """Mark the snapshot at the next turn's anchor as used, so that it is dropped after later snapshots."""
        anchor = self._next_turn_anchor(job)
        if 0 < anchor <= job.num_computed_tokens:
            self.cache.states.mark_used(job.id, anchor)

    def plan_snapshots(self, scheduled_tokens: Iterable[tuple[Job, int]]) -> tuple[RowSnapshot, ...]:
        """Plan the snapshots of recurrent states in a step that computes `scheduled_tokens`, as (job, count). None is
        taken after a drafted token.
        """
        snapshots = []
        for job, count in scheduled_tokens if self.cache.states.snapshots is not None else ():
            end = min(job.num_computed_tokens + count, len(job.tokens))
            all_positions = (*job.snapshot_positions, *job.spare_positions)
            for position in sorted(place for place in all_positions if job.num_computed_tokens < place <= end):
                snapshot = self.cache.states.make_snapshot(job.id, position, position in job.spare_positions)
                if snapshot is not None:
                    snapshots.append(RowSnapshot(job.row, position, snapshot))
                    self._use_anchor(job)
        return tuple(snapshots)

    def _fork(self, job: Job, parent: Job) -> tuple[BlockCopy, ...]:
        """Give a fork its parent's blocks, and room for its tokens. Return the block copies that this takes."""
        copies = self.cache.fork(parent.id, job.id, job.kept_prompt_length - 1)
        try:
            self.cache.reserve(job.id, len(job.tokens))
        except KVCacheFull:
            self.cache.free(job.id)
            raise
        return copies

    def reserve(self, job: Job, tokens: int) -> bool:
        """Reserve blocks for `tokens` tokens of a running job. Return False if another row must be preempted first.

        If there are too few blocks, headroom is dropped. If the system refuses memory, the job gets what the cache can
        have, and ends there. Raises KVCacheFull if there is no other row.
        """
        if tokens > self.cache.tables.capacity_tokens:
            self.cache.pools.reset_limits_if_cheap()
        while True:
            capacity = self.cache.tables.capacity_tokens
            if tokens > capacity:
                limit_answer(job, capacity)
                tokens, self.has_outgrown_cache = capacity, True
            job.reserved_tokens = max(job.reserved_tokens, tokens)
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
        """Free the blocks that running jobs have beyond their reserved tokens. Return how many became free."""
        return sum(self.cache.free_spare_blocks(job.id, job.reserved_tokens) for job in self.jobs)

    @property
    def has_drafts(self) -> bool:
        """Whether a row has drafted tokens to verify, or a step in flight verifies some."""
        return any(job.drafts_in_flight or (job.drafts and job.can_decode) for job in self.jobs)

    def note_stored(self, job: Job, tokens: int) -> None:
        """Note that a job's first `tokens` tokens are in the arena, or will be before any read. Cache their blocks."""
        previous_stored = job.num_stored_tokens
        self._text_tokens -= tokens - previous_stored if job.is_pooling else 0
        job.num_stored_tokens = tokens
        if self.shares_prefix(job):
            num_cacheable = job.num_sharable(min(tokens, len(job.tokens)))
            self.cache.register(job.id, job.tokens, num_cacheable, job.keys)
            all_positions = (*job.spare_positions, *job.snapshot_positions)
            for position in sorted(p for p in all_positions if previous_stored < p <= num_cacheable):
                self.cache.add_resume_point(job.id, position, position in job.spare_positions)
        self.changes += 1

    def should_cache_newest(self, job: Job) -> bool:
        """Return whether to cache an ended job's newest tokens, too: if it finished, or if other jobs need them.

        Other jobs can also begin with the older tokens of a cancelled job, those up to the last flush. But where the
        model has recurrent states, they can only begin with all of them.
        """
        well = job.state is RequestState.FINISHED
        cut_short = job.state is RequestState.CANCELLED and self.cache.has_states
        return self.shares_prefix(job) and (well or cut_short)

    def release_row(self, job: Job) -> None:
        """Free an ended or preempted job's row, but not its blocks."""
        self.jobs.remove(job)
        if job.is_pooling:
            self._texts -= 1
            self._text_tokens -= _missing_tokens(job)
        self.changes += 1

    def release_blocks(self, job: Job) -> None:
        """Free the blocks of a job that has no row any more. Its stored tokens stay cached, and its newest recurrent
        state, too, unless that includes tokens that are not cached.

        If the job continues with a part of its text, the cached whole text is evicted first.
        """
        num_cacheable = job.num_sharable(min(job.num_stored_tokens, len(job.tokens))) if self.shares_prefix(job) else 0
        # It is not known whether a block with drafts can be used: see `drafts.accept_drafts`.
        if job.drafts_in_flight:
            num_cacheable -= num_cacheable % self.cache.block_size
        self.cache.states.end_row(job.row, job.id, job.state_at if job.state_at <= num_cacheable else 0)
        if self.shares_prefix(job):
            self.cache.cache_and_free(job.id, job.tokens, num_cacheable, job.keys, evict_first=job.must_drop_tokens)
        else:
            self.cache.free(job.id)
        self.changes += 1


def _missing_tokens(job: Job) -> int:
    """Return how many tokens of a text are not in the arena yet."""
    return len(job.tokens) - job.num_stored_tokens


def can_fork(job: Job) -> bool:
    """Return whether a fork can copy its parent's blocks now: all of the prompt but the last token is in the arena."""
    parent = job.fork_of
    return (
        parent is not None
        and parent.state is RequestState.DECODING
        and not parent.drops
        and parent.num_stored_tokens >= job.kept_prompt_length - 1
    )
