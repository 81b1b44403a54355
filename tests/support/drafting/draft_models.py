"""A draft model without an engine, and models that may draft for the tiny ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cortexmlx.core.config import EngineConfig
from cortexmlx.core.core import EngineCore
from cortexmlx.core.draft_model import DraftModel, open_draft
from cortexmlx.scheduling.job import Job, RowTokens
from cortexmlx.speculation.drafter import HeadQuery
from cortexmlx.speculation.speculation import Speculation
from support.models.tiny import VOCAB, write_tiny


def draft_model(folder: Path, blocks: int = 64, **config: Any) -> DraftModel:
    """A draft model with an arena of at most so many blocks of 8 tokens."""
    settings = {"block_size": 8, "max_rows": 4, "prefill_budget": 32} | config
    asked = EngineConfig("the other model", draft=str(folder), **settings)
    opened = open_draft(asked)
    opened.blocks = tuple(blocks for _ in opened.blocks)
    return DraftModel(opened, asked.max_rows, asked.prefill_budget, VOCAB)


def guesses(model: DraftModel, jobs: Sequence[Job], count: int = 4) -> list[list[int] | None]:
    """What it guesses, after which its books are looked at."""
    drafts = model.propose(jobs, count)
    assert not model.has_failed
    model.rows.check_invariants()
    return [None if draft is None else list(draft.tokens) for draft in drafts]


def wide_tiny(folder: Path, **changes: Any) -> Path:
    """A tiny llama whose weights can be quantized."""
    return write_tiny(folder, hidden_size=64, intermediate_size=64, **changes)


class Eager(Speculation):
    """Speculation that has all rows' next four tokens guessed by the draft model at each step, whether it pays or
    not.
    """

    model: DraftModel | None
    drafted: int
    accepted: int

    @property
    def needs_drained_pipeline(self) -> bool:
        return self.model is not None and self.model.needs_drained_pipeline and bool(self._scheduler.draftable_jobs)

    def draft(self) -> None:
        jobs = [job for job in self._scheduler.draftable_jobs if not job.drafts]
        for job, draft in zip(jobs, () if self.model is None else self.model.propose(jobs, 4), strict=False):
            if draft is not None:
                self._scheduler.set_drafts(job.id, draft.tokens)

    def learn(self, plan: object, seconds: float, verified_rows: Sequence[RowTokens]) -> None:
        self.drafted += sum(row.num_drafted for row in verified_rows)
        self.accepted += sum(row.num_accepted for row in verified_rows)


def ask_head(core: Any) -> None:
    """Before each step where it can be, have the head guess three tokens of each row; else they are wrong."""

    def draft() -> None:
        jobs = [] if core._in_flight else core.scheduler.draftable_jobs
        rows = [(j.id, j.generation, len(j.tokens) - 2, j.tokens[-1], j.position_shift) for j in jobs]
        query = HeadQuery(rows, 3, core.scheduler.locate_rows(jobs))
        for job, tokens in zip(jobs, core.runner.propose(query) if jobs else (), strict=True):
            core.scheduler.set_drafts(job.id, tokens or [7, 8])

    core.speculation.draft = draft


def make_eager(core: EngineCore) -> Eager:
    """Let a core draft eagerly from now on, until it begins anew."""
    speculation: Any = core.speculation
    speculation.__class__ = Eager
    speculation.model, speculation.drafted, speculation.accepted = core.draft, 0, 0
    return speculation
