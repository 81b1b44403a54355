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

MAX_ROUND_TOKENS = TAIL_COLUMNS
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
    num_job_tokens: int
    """How many tokens of the row are the job's text. The others are guesses."""
    drops: int
    """How often the job had dropped tokens when it was followed first."""


class DraftScheduler:
    """Plans the steps of a draft model in rounds. A round begins with one MIXED step, which computes the new tokens of
    all rows, and continues with DECODE steps. Each step adds one guess to each row.

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
        attend to, and `vocabulary` how many it knows. With `share_prefixes`, rows reuse cached prefixes.
        """
        self.cache = cache
        self._budget = budget
        self._context = context
        self._vocabulary = vocabulary
        self._running = RunningSet(cache, Backoff(max_rows, budget), _HEADROOM, share_prefixes)
        self._window = DecodeWindow(cache, self._running)
        self._builder = StepBuilder(cache)
        self._draft_rows: dict[JobId, _DraftRow] = {}
        self._undraftable_jobs: set[JobId] = set()

    # -- a round ------------------------------------------------------------------------------------------------------

    def begin_round(self, jobs: Sequence[Job], count: int) -> StepPlan | None:
        """Plan the first step of a round that guesses the next `count` tokens of each of the `jobs`. None if nothing
        is to be computed: the last guesses still fit, or there is no room.
        """
        count = min(count, MAX_ROUND_TOKENS)
        jobs = [job for job in jobs if self._can_draft_for(job, count)]
        if all(self._has_guess(job) for job in jobs):
            return None
        texts = {job.id: job for job in jobs}
        for draft_row in self._draft_rows.values():
            self._rewind_row(draft_row, texts.get(draft_row.row.id))
        flush = self._window.close()
        for row in self._running.jobs:
            row.state = RequestState.PREFILLING
        copies = self._begin_rows(jobs)
        scheduled_tokens = self._schedule_new_tokens(jobs, count)
        if scheduled_tokens:
            plan = self._builder.build_mixed(scheduled_tokens, flush)
            self._advance_rows(plan, scheduled_tokens)
        elif flush is not None or copies:
            plan = self._builder.build_flush(flush)
        else:
            return None
        return replace(plan, copies=copies) if copies else plan

    def plan_decode(self) -> StepPlan | None:
        """Plan the next step of the round, which may run ahead of the one before; None if each row has its guesses."""
        plan_and_rows = self._window.plan_step(self._builder, self._reserve_blocks)
        if plan_and_rows is None:
            return None
        plan, rows = plan_and_rows
        self._advance_rows(plan, [(row, 1) for row in rows])
        return plan

    def append_guesses(self, plan: StepPlan, tokens: Sequence[int]) -> None:
        """Append the tokens that a step has chosen, each to its row."""
        for segment, token in zip(plan.logit_segments, tokens, strict=True):
            draft_row = self._draft_rows.get(segment.job)
            if segment.live and draft_row is not None and draft_row.row.generation == segment.generation:
                draft_row.row.tokens.append(token)

    def get_draft(self, job: Job, count: int, vocabulary: int) -> TokenDraft | None:
        """Return up to `count` guessed next tokens of a job, all below `vocabulary`; None if there are none."""
        if not self._has_guess(job):
            return None
        guessed_tokens = self._draft_rows[job.id].row.tokens[len(job.tokens) :][:count]
        valid_tokens = cut_to_vocabulary(guessed_tokens, vocabulary)
        return TokenDraft(valid_tokens) if valid_tokens else None

    # -- rows come and go ---------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self._draft_rows)

    def end_job(self, job: JobId) -> None:
        """Give up the row of a job that has ended. What it has stored stays cached. Unknown jobs are ignored."""
        self._undraftable_jobs.discard(job)
        self._release_row(job)

    def _release_row(self, job: JobId) -> None:
        """Release the draft model's row of a job, and its blocks, if it has one."""
        draft_row = self._draft_rows.pop(job, None)
        if draft_row is None:
            return
        row = draft_row.row
        row.state = RequestState.FINISHED
        row.generation += 1
        self._running.release_row(row)
        self._running.release_blocks(row)
        if not self._draft_rows:
            self._window.forget()

    def drop_tail(self) -> None:
        """Forget the keys and values that are in the tail only. The guessed tokens stay."""
        for draft_row in self._draft_rows.values():
            row = draft_row.row
            row.num_computed_tokens = row.state_at = row.num_stored_tokens
            self.cache.truncate(row.id, row.num_computed_tokens)
            row.num_planned_outputs = row.max_new_tokens = row.num_generated
            row.state = RequestState.PREFILLING
        self._window.forget()

    def forget(self) -> None:
        """Give up all rows and all cached blocks, because what a failed step has written is unknown."""
        for draft_row in self._draft_rows.values():
            self._running.release_row(draft_row.row)
            self.cache.free(draft_row.row.id)
        self._draft_rows.clear()
        self._undraftable_jobs.clear()
        self._window.forget()
        self._builder.forget_results()
        self.cache.pools.drop_cached()

    def check_invariants(self) -> None:
        """Raise AssertionError if rows, sequences and blocks do not fit together."""
        rows = [draft_row.row for draft_row in self._draft_rows.values()]
        assert sorted(row.id for row in rows) == sorted(row.id for row in self._running.jobs)
        assert self.cache.tables.sequences.keys() == {row.id for row in rows}, "blocks of nobody, or nobody's blocks"
        for follower in self._draft_rows.values():
            row = follower.row
            row.check_invariants(self.cache.tables.length(row.id))
            assert row.num_stored_tokens <= follower.num_job_tokens <= len(row.tokens), (
                f"row {row.id} has stored a guess"
            )
        self.cache.check_invariants()

    # -- inside a round -----------------------------------------------------------------------------------------------

    def _can_draft_for(self, job: Job, count: int) -> bool:
        """Return whether a job can use drafts of this model. Release a row that no longer fits its job."""
        draft_row = self._draft_rows.get(job.id)
        if draft_row is not None and draft_row.drops != job.drops:
            self._release_row(job.id)
            draft_row = None
        new_tokens = job.tokens[0 if draft_row is None else draft_row.num_job_tokens :]
        if new_tokens and (max(new_tokens) >= self._vocabulary or min(new_tokens) < 0):  # negative: those of images
            self._undraftable_jobs.add(job.id)
        if job.id in self._undraftable_jobs or len(job.tokens) + count > self._context:
            self._release_row(job.id)
            return False
        return job.num_plannable > 1

    def _has_guess(self, job: Job) -> bool:
        """Return whether a job's row guessed the newest tokens right, and has guesses after them."""
        draft_row, end = self._draft_rows.get(job.id), len(job.tokens)
        if draft_row is None or draft_row.drops != job.drops or len(draft_row.row.tokens) <= end:
            return False
        return draft_row.row.tokens[draft_row.num_job_tokens : end] == job.tokens[draft_row.num_job_tokens :]

    def _rewind_row(self, draft_row: _DraftRow, job: Job | None) -> None:
        """Rewind a row to what it has in common with the text of its job, and append what is new there. Further
        guesses stay if they still fit. `job` is None if the row takes no part in the round.
        """
        row, num_job_tokens = draft_row.row, draft_row.num_job_tokens
        new_tokens = [] if job is None else job.tokens[num_job_tokens:]
        guessed_tokens = row.tokens[num_job_tokens:]
        common_length = common_prefix_length(guessed_tokens, new_tokens)
        row.num_computed_tokens = row.state_at = min(row.num_computed_tokens, num_job_tokens + common_length)
        self.cache.truncate(row.id, row.num_computed_tokens)
        row.tokens[num_job_tokens:] = new_tokens + (
            guessed_tokens[common_length:] if common_length == len(new_tokens) else []
        )
        draft_row.num_job_tokens = num_job_tokens + len(new_tokens)
        row.num_planned_outputs = row.max_new_tokens = row.num_generated

    def _begin_rows(self, jobs: Sequence[Job]) -> tuple[BlockCopy, ...]:
        """Begin rows for jobs that have none, if there is room. A row waits for a block that another is computing."""
        copies: list[BlockCopy] = []
        computing_keys = {
            key for draft_row in self._draft_rows.values() if (key := self._next_block_key(draft_row.row)) is not None
        }
        try:
            for job in jobs:
                if job.id in self._draft_rows or not self._has_room(job, {each.id for each in jobs}):
                    continue
                row = self._make_row(job)
                match = self._running.match(row)
                key = self._next_block_key(row, 0 if match is None else len(match.entries))
                if key in computing_keys:
                    continue
                try:
                    copies += self._running.begin(row, match)
                except KVCacheFull:
                    break
                self._draft_rows[job.id] = _DraftRow(row, len(row.tokens), job.drops)
                if key is not None:
                    computing_keys.add(key)
        finally:
            self.cache.release_copy_sources()
        return tuple(copies)

    def _has_room(self, job: Job, requested_ids: set[JobId]) -> bool:
        """Return whether there is room for a job. The row of a job not in `requested_ids` may be released for it."""
        if len(self._draft_rows) >= self._running.backoff.rows:
            idle = next((number for number in self._draft_rows if number not in requested_ids), None)
            if idle is None:
                return False
            self._release_row(idle)
        return self.cache.tables.can_obtain(self.cache.blocks_needed(len(job.tokens) + MAX_ROUND_TOKENS, None))

    def _make_row(self, job: Job) -> Job:
        """Return a new row with the text of a job, of which nothing is computed."""
        request = QueuedRequest(tuple(job.tokens), _GREEDY, client=job.client, cache=job.request.cache)
        row = Job(job.id, request, frozenset(), _HEADROOM, job.arrival, job.number, [], salt=job.salt)
        row.keys = self._running.compute_keys(row.tokens, row.salt, request.cache)
        return row

    def _next_block_key(self, row: Job, num_blocks: int | None = None) -> Key | None:
        """Return the key of the full block after the first `num_blocks` (None: the computed ones); None at the end."""
        index = row.num_computed_tokens // self.cache.block_size if num_blocks is None else num_blocks
        return row.keys[index] if index < len(row.keys) else None

    def _schedule_new_tokens(self, jobs: Sequence[Job], count: int) -> ScheduledTokens:
        """Schedule the new tokens of the jobs' rows, the shortest first, within the budget. A row whose whole text
        is computed then may guess `count` tokens, or as many as its job can use.
        """
        job_draft_rows = [(job, draft_row) for job in jobs if (draft_row := self._draft_rows.get(job.id)) is not None]
        pending_rows = [(job, f.row) for job, f in job_draft_rows if len(f.row.tokens) == f.num_job_tokens]
        remaining_budget, scheduled_tokens = self._budget, []
        for job, row in sorted(pending_rows, key=lambda pair: len(pair[1].tokens) - pair[1].num_computed_tokens):
            needed_tokens = (
                min(len(row.tokens), self.cache.max_tokens_without_preemption(row.id)) - row.num_computed_tokens
            )
            chunk_size = min(needed_tokens, remaining_budget)
            if chunk_size < 1:
                continue
            self._reserve_blocks(row, row.num_computed_tokens + chunk_size)
            if row.is_running:
                row.num_planned_outputs = row.num_generated
                row.max_new_tokens = row.num_generated + min(count, job.num_plannable - 1)
                scheduled_tokens.append((row, chunk_size))
                remaining_budget -= chunk_size
        return sorted(scheduled_tokens, key=lambda each: each[1] > 1)

    def _reserve_blocks(self, row: Job, tokens: int) -> None:
        """Reserve blocks for `tokens` tokens of a row, or release the row: other rows do not make room."""
        try:
            is_reserved = self._running.reserve(row, tokens)
        except KVCacheFull:
            is_reserved = False
        if not is_reserved:
            self._release_row(row.id)

    def _advance_rows(self, plan: StepPlan, scheduled_tokens: ScheduledTokens) -> None:
        """Advance each row by the tokens that the planned step computes."""
        for row, count in scheduled_tokens:
            row.num_computed_tokens += count
            row.state_at = row.num_computed_tokens
            self.cache.append(row.id, count)
            if plan.kind is StepKind.MIXED:
                self._running.note_stored(row, row.num_computed_tokens)
                if row.num_computed_tokens < len(row.tokens):
                    continue
                row.state = RequestState.DECODING
            row.num_planned_outputs += 1
