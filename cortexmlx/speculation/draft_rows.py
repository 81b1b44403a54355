"""The rows of a draft model, one for each job that it drafts for, and the steps that compute them. Without mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import Key, common_prefix_length
from cortexmlx.kv.spec import TAIL_COLUMNS
from cortexmlx.kv.step import BlockCopy
from cortexmlx.scheduling.builder import ScheduledTokens, StepBuilder
from cortexmlx.scheduling.decode_window import DecodeWindow
from cortexmlx.scheduling.drafts import cut_to_vocabulary
from cortexmlx.scheduling.job import Job, JobId
from cortexmlx.scheduling.plan import StepKind, StepPlan
from cortexmlx.scheduling.running import RunningSet
from cortexmlx.scheduling.shortage import Backoff
from cortexmlx.speculation.drafter import TokenDraft
from cortexmlx.types.request import QueuedRequest, RequestState
from cortexmlx.types.sampling_params import SamplingParams

MOST_ROUND_TOKENS = TAIL_COLUMNS
"""How many tokens a round guesses at most: the tail keeps those of one round, until the next one knows the right
ones.
"""

_HEADROOM = 128
"""Tokens allocated beyond a text, so that its answer stays in one run of blocks."""

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(eq=False)
class _DraftRow:
    """A row of the draft model, which continues the text of one of the engine's jobs."""

    row: Job
    """The draft model's own job. It has the number of the other one, and its text with what was guessed after it."""
    known: int
    """How many tokens of the row are the job's text. The others are guesses."""
    drops: int
    """How often the job had dropped tokens when it was followed first."""


class DraftScheduler:
    """Plans the steps of a draft model in rounds. A round begins with what is new in the texts of all rows, which is
    one MIXED step, and continues with DECODE steps. Each of them adds one guess to each row.

    A row lives as long as the job that it follows. When a round begins, all guesses before it are forgotten, and the
    rows are cut back to what they have in common with the texts. No guess is ever stored where others may find it.

    `begin_round` may only be called while nothing is in flight.
    """

    def __init__(
        self,
        cache: KVCache,
        max_rows: int,
        budget: int,
        context: int,
        vocabulary: int,
        share_prefixes: bool = True,
    ) -> None:
        """`budget` is how many tokens of texts a step computes at most, `context` how many tokens the draft model can
        attend to, and `vocabulary` how many it knows. With `share_prefixes`, rows begin with what others have computed.
        """
        self.cache = cache
        self._budget = budget
        self._context = context
        self._vocabulary = vocabulary
        self._running = RunningSet(cache, Backoff(max_rows, budget), _HEADROOM, share_prefixes)
        self._window = DecodeWindow(cache, self._running)
        self._builder = StepBuilder(cache)
        self._followers: dict[JobId, _DraftRow] = {}
        self._strange: set[JobId] = set()

    # -- a round ------------------------------------------------------------------------------------------------------

    def begin_round(self, jobs: Sequence[Job], count: int) -> StepPlan | None:
        """Plan the first step of a round that guesses the next `count` tokens of each of the `jobs`. None if nothing
        is to be computed: the last guesses still fit, or there is no room.
        """
        count = min(count, MOST_ROUND_TOKENS)
        jobs = [job for job in jobs if self._can_draft_for(job, count)]
        if all(self._has_guess(job) for job in jobs):
            return None
        texts = {job.id: job for job in jobs}
        for follower in self._followers.values():
            self._rewind_row(follower, texts.get(follower.row.id))
        flush = self._window.close()
        for row in self._running.jobs:
            row.state = RequestState.PREFILLING
        copies = self._begin_rows(jobs)
        scheduled = self._schedule_new_tokens(jobs, count)
        if scheduled:
            plan = self._builder.build_mixed(scheduled, flush)
            self._advance_rows(plan, scheduled)
        elif flush is not None or copies:
            plan = self._builder.build_flush(flush)
        else:
            return None
        return replace(plan, copies=copies) if copies else plan

    def plan_decode(self) -> StepPlan | None:
        """Plan the next step of the round, which may run ahead of the one before; None if each row has its guesses."""
        planned = self._window.plan_step(self._builder, self._reserve_blocks)
        if planned is None:
            return None
        plan, rows = planned
        self._advance_rows(plan, [(row, 1) for row in rows])
        return plan

    def append_guesses(self, plan: StepPlan, tokens: Sequence[int]) -> None:
        """Append the tokens that a step has computed to its rows."""
        for segment, token in zip(plan.logit_segments, tokens, strict=True):
            follower = self._followers.get(segment.job)
            if segment.live and follower is not None and follower.row.generation == segment.generation:
                follower.row.tokens.append(token)

    def get_draft(self, job: Job, count: int, vocabulary: int) -> TokenDraft | None:
        """Return up to `count` guessed next tokens of a job, up to the first one not below `vocabulary`; None if there
        are none.
        """
        if not self._has_guess(job):
            return None
        guessed = self._followers[job.id].row.tokens[len(job.tokens) :][:count]
        known = cut_to_vocabulary(guessed, vocabulary)
        return TokenDraft(known) if known else None

    # -- rows come and go ---------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self._followers)

    def end_job(self, job: JobId) -> None:
        """Give up the row of a job that has ended. What it has stored stays cached. Unknown jobs are ignored."""
        self._strange.discard(job)
        self._release_row(job)

    def _release_row(self, job: JobId) -> None:
        """Release the draft model's row of a job, and its blocks, if it has one."""
        follower = self._followers.pop(job, None)
        if follower is None:
            return
        row = follower.row
        row.state = RequestState.FINISHED
        row.generation += 1
        self._running.release_row(row)
        self._running.release_blocks(row)
        if not self._followers:
            self._window.forget()

    def drop_tail(self) -> None:
        """Forget what was computed in the tail only. The guessed tokens stay."""
        for follower in self._followers.values():
            row = follower.row
            row.num_computed_tokens = row.state_at = row.num_stored_tokens
            self.cache.truncate(row.id, row.num_computed_tokens)
            row.num_planned_outputs = row.max_new_tokens = row.num_generated
            row.state = RequestState.PREFILLING
        self._window.forget()

    def forget(self) -> None:
        """Give up all rows and all cached blocks, because what a failed step has written is unknown."""
        for follower in self._followers.values():
            self._running.release_row(follower.row)
            self.cache.free(follower.row.id)
        self._followers.clear()
        self._strange.clear()
        self._window.forget()
        self._builder.forget_results()
        self.cache.pools.drop_cached()

    def check_invariants(self) -> None:
        """Raise AssertionError if rows, sequences and blocks do not fit together."""
        rows = [follower.row for follower in self._followers.values()]
        assert sorted(row.id for row in rows) == sorted(row.id for row in self._running.jobs)
        assert self.cache.tables.sequences.keys() == {row.id for row in rows}, "blocks of nobody, or nobody's blocks"
        for follower in self._followers.values():
            row = follower.row
            row.check_invariants(self.cache.tables.length(row.id))
            assert row.num_stored_tokens <= follower.known <= len(row.tokens), f"row {row.id} has stored a guess"
        self.cache.check_invariants()

    # -- inside a round -----------------------------------------------------------------------------------------------

    def _can_draft_for(self, job: Job, count: int) -> bool:
        """Return whether the draft model can guess for a job, and the job can use a guess. A row that no longer fits
        its job is released.
        """
        follower = self._followers.get(job.id)
        if follower is not None and follower.drops != job.drops:
            self._release_row(job.id)
            follower = None
        if max(job.tokens[0 if follower is None else follower.known :], default=0) >= self._vocabulary:
            self._strange.add(job.id)
        if job.id in self._strange or len(job.tokens) + count > self._context:
            self._release_row(job.id)
            return False
        return job.num_plannable > 1

    def _has_guess(self, job: Job) -> bool:
        """Return whether a job's row guessed the newest tokens right, and has guesses after them."""
        follower, end = self._followers.get(job.id), len(job.tokens)
        if follower is None or follower.drops != job.drops or len(follower.row.tokens) <= end:
            return False
        return follower.row.tokens[follower.known : end] == job.tokens[follower.known :]

    def _rewind_row(self, follower: _DraftRow, job: Job | None) -> None:
        """Rewind a row to what it has in common with the text of its job, and append what is new there. Further
        guesses stay if they still fit. None: the job takes no part in the round.
        """
        row, known = follower.row, follower.known
        new = [] if job is None else job.tokens[known:]
        guessed = row.tokens[known:]
        same = common_prefix_length(guessed, new)
        row.num_computed_tokens = row.state_at = min(row.num_computed_tokens, known + same)
        self.cache.truncate(row.id, row.num_computed_tokens)
        row.tokens[known:] = new + (guessed[same:] if same == len(new) else [])
        follower.known = known + len(new)
        row.num_planned_outputs = row.max_new_tokens = row.num_generated

    def _begin_rows(self, jobs: Sequence[Job]) -> tuple[BlockCopy, ...]:
        """Begin rows for the jobs that have none, if there is room. A row waits for a block that another one is still
        computing.
        """
        copies: list[BlockCopy] = []
        computed = {key for f in self._followers.values() if (key := self._next_block_key(f.row, None)) is not None}
        try:
            for job in jobs:
                if job.id in self._followers or not self._has_room(job, {each.id for each in jobs}):
                    continue
                row = self._make_row(job)
                match = self._running.match(row)
                key = self._next_block_key(row, 0 if match is None else len(match.entries))
                if key in computed:
                    continue
                try:
                    copies += self._running.begin(row, match)
                except KVCacheFull:
                    break
                self._followers[job.id] = _DraftRow(row, len(row.tokens), job.drops)
                if key is not None:
                    computed.add(key)
        finally:
            self.cache.release_copy_sources()
        return tuple(copies)

    def _has_room(self, job: Job, asked: set[JobId]) -> bool:
        """Return whether a job can get a row, and enough blocks even if none of its text is cached. Rows whose jobs
        are not `asked` for give way.
        """
        if len(self._followers) >= self._running.backoff.rows:
            idle = next((number for number in self._followers if number not in asked), None)
            if idle is None:
                return False
            self._release_row(idle)
        return self.cache.tables.can_obtain(self.cache.blocks_needed(len(job.tokens) + MOST_ROUND_TOKENS, None))

    def _make_row(self, job: Job) -> Job:
        """Return a new row with the text of a job, of which nothing is computed."""
        request = QueuedRequest(tuple(job.tokens), _GREEDY, client=job.client, cache=job.request.cache)
        row = Job(job.id, request, frozenset(), _HEADROOM, job.arrival, job.number, [], salt=job.salt)
        row.keys = self._running.compute_keys(row.tokens, row.salt, request.cache)
        return row

    def _next_block_key(self, row: Job, blocks: int | None) -> Key | None:
        """Return the key of the prompt's block after the first `blocks`, or after those computed if that is None. None
        if there is no such whole block.
        """
        index = row.num_computed_tokens // self.cache.block_size if blocks is None else blocks
        return row.keys[index] if index < len(row.keys) else None

    def _schedule_new_tokens(self, jobs: Sequence[Job], count: int) -> ScheduledTokens:
        """Schedule the new tokens of the jobs' rows, the shortest first, within the budget. A row whose text is then
        computed as a whole guesses `count` tokens, or as many as its job can use.
        """
        followed = [(job, f) for job in jobs if (f := self._followers.get(job.id)) is not None]
        behind = [(job, f.row) for job, f in followed if len(f.row.tokens) == f.known]
        left, scheduled = self._budget, []
        for job, row in sorted(behind, key=lambda pair: len(pair[1].tokens) - pair[1].num_computed_tokens):
            need = min(len(row.tokens), self.cache.max_tokens_without_preemption(row.id)) - row.num_computed_tokens
            piece = min(need, left)
            if piece < 1:
                continue
            self._reserve_blocks(row, row.num_computed_tokens + piece)
            if row.is_running:
                row.num_planned_outputs = row.num_generated
                row.max_new_tokens = row.num_generated + min(count, job.num_plannable - 1)
                scheduled.append((row, piece))
                left -= piece
        return sorted(scheduled, key=lambda each: each[1] > 1)

    def _reserve_blocks(self, row: Job, tokens: int) -> None:
        """Reserve blocks for `tokens` tokens of a row. The row is released if there are none: others do not make
        room.
        """
        try:
            kept = self._running.reserve(row, tokens)
        except KVCacheFull:
            kept = False
        if not kept:
            self._release_row(row.id)

    def _advance_rows(self, plan: StepPlan, scheduled: ScheduledTokens) -> None:
        """Advance each row by the tokens that the planned step computes."""
        for row, count in scheduled:
            row.num_computed_tokens += count
            row.state_at = row.num_computed_tokens
            self.cache.append(row.id, count)
            if plan.kind is StepKind.MIXED:
                self._running.note_stored(row, row.num_computed_tokens)
                if row.num_computed_tokens < len(row.tokens):
                    continue
                row.state = RequestState.DECODING
            row.num_planned_outputs += 1
