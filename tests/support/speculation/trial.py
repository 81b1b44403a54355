"""A trial: random requests to an engine that speculates, with whatever can happen on the way, beside an engine that
verifies nothing.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

from cortexmlx.core.handle import RequestHandle
from cortexmlx.scheduling.decode_window import DrainReason
from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.types.request import Completion
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.refusals import Refusals
from support.models.recurrent import RECURRENT
from support.models.sighted import show
from support.patience import PATIENCE
from support.speculation.compared import Compared
from support.speculation.counts import Counts
from support.speculation.guessers import GUESSES
from support.speculation.kinds import Kind
from support.speculation.random_requests import random_request

MAX_STEPS = 20_000
MAX_REFUSALS = 3


class Trial:
    """One engine with a random configuration. Everything follows from the seed, but for what `Speculation` itself
    drafts now and then, since it looks at the clock.
    """

    def __init__(self, seed: int, kind: Kind, requests: int = 10, store: Path | None = None) -> None:
        """`store`: a folder, if the engine is to keep blocks on disk."""
        self.where = f"seed {seed}, {kind.name}"
        self.kind = kind
        self.dice = dice = random.Random(seed)
        keep = KeepPolicy(dice.randint(0, 4), dice.randint(8, 20)) if dice.random() < 0.12 else None
        self.forced = dice.random() < 0.5
        self.asked = [random_request(dice, kind.kv_bits is not None, keep is not None) for _ in range(requests)]
        self.refuses = dice.random() < 0.08
        self.store = store if dice.random() < 0.15 and keep is None else None
        self.keep = keep
        self._numbers: dict[int, int] = {}
        self._handles: dict[int, RequestHandle] = {}
        self._refused: Refusals | None = None

    def run(self, counts: Counts) -> None:
        """Run both engines, and compare what they say."""
        wanted = self._without()
        driver = self._driver()
        try:
            self._drive(driver, wanted)
            self._count(driver, counts)
            for number, asked in enumerate(self.asked):
                where, kind = self._of_request(number)
                compared = Compared(driver, kind, self.keep, self.forced, bool(self._refusals), counts)
                compared.request(where, asked, self._handles[number], wanted[number])
        finally:
            driver.core.release()

    def _of_request(self, number: int) -> tuple[str, Kind]:
        """How a request is called, and the model that judges it."""
        return f"{self.where}, request {number}", self.kind

    def _settings(self) -> dict[str, Any]:
        """What both engines have alike."""
        kept = {} if self.keep is None else {"keep_first": self.keep.first, "keep_last": self.keep.last}
        return {"forced_tokens": self.forced, "kv_bits": self.kind.kv_bits, **kept}

    def _without(self) -> list[Completion]:
        """The answers of an engine that verifies nothing. Those of which the best are chosen are all there."""
        driver = roomy(self.kind.folder, tuple(self._settings().items()))
        handles = [asked.add(driver, every=True) for asked in self.asked]
        driver.finish()
        assert not driver.core.scheduler.pipeline_gate.steps[DrainReason.VERIFY]
        return [driver.result(handle) for handle in handles]

    def _driver(self) -> Driver:
        dice = self.dice
        tight, states = dice.random() < 0.5, 80 if self.kind.name.split()[0] in RECURRENT else 0
        states += 80 if "head" in self.kind.name else 0  # its keys and values
        states += 150 if "gemma4" in self.kind.name else 0  # images of up to 70 tokens
        tokens = dice.choice([104, 120, 144]) + states if tight else 2048
        driver = Driver(
            self.kind.folder,
            tokens=tokens,
            block_size=8 if tight else dice.choice([8, 16]),
            max_rows=dice.randint(3, 8) if tight else dice.randint(1, 6),
            pipeline=dice.random() < 0.8,
            prefix_cache=dice.random() < 0.8,
            speculate=True,
            **{"prefill_budget": dice.choice([8, 16, 64])} | self._settings(),
            **({} if self.store is None else {"kv_store": self.store}),
        )
        driver.limit_blocks(tokens)
        return driver

    # -- on the way ---------------------------------------------------------------------------------------------------

    def _drive(self, driver: Driver, wanted: list[Completion]) -> None:
        core, dice = driver.core, self.dice
        assert core.speculation is not None
        own = core.speculation.draft
        core.speculation.draft = (  # type: ignore[method-assign]
            lambda: own() if dice.random() < 0.15 else self._draft(driver, wanted)
        )
        if self.refuses:
            self._refused = Refusals(core, self._refuse)
        for step in range(MAX_STEPS):
            if len(self._handles) == len(self.asked) and core.idle and not core.scheduler.jobs:
                return
            self._come_and_go(driver, step)
            if dice.random() < 0.03:
                core.relieve(dice.random() < 0.5)
            while not driver.calls.empty():
                driver.calls.get()(core)
            if core.idle and core.scheduler.jobs:  # all wait for the disk
                driver.calls.get(timeout=PATIENCE)(core)
            elif not core.idle:
                core.step()
            core.check_invariants()
        raise AssertionError(f"{self.where}: it never comes to an end")

    def _come_and_go(self, driver: Driver, step: int) -> None:
        for number, asked in enumerate(self.asked):
            if asked.arrives == step:
                self._handles[number] = handle = asked.add(driver)
                self._numbers[handle.id] = number
            if asked.cancelled == step:
                driver.core.cancel(self._handles[number].id)

    def _draft(self, driver: Driver, wanted: list[Completion]) -> None:
        """In the place of `Speculation.draft`: most rows get a guess, also those that may not have any. A row has one
        source, mostly.
        """
        core = driver.core
        for job in core.scheduler.jobs:
            answer = core.requests.answers.get(job.id)
            if answer is None or self.dice.random() < 0.2:
                continue
            first = wanted[self._numbers[answer.group.handle.id]]
            whole = (first, *first.others)[answer.index].token_ids
            guess = GUESSES[(job.id if self.dice.random() < 0.8 else self.dice.randrange(99)) % len(GUESSES)]
            core.scheduler.set_drafts(job.id, guess(self.dice, whole, job.num_generated, core.info.vocab_size))

    @property
    def _refusals(self) -> int:
        return 0 if self._refused is None else self._refused.count

    def _refuse(self, plan: object) -> str | None:
        return "under way" if self._refusals < MAX_REFUSALS and self.dice.random() < 0.02 else None

    def _count(self, driver: Driver, counts: Counts) -> None:
        stats = driver.core.stats()
        assert_nothing_lost(stats)
        verified = driver.core.scheduler.pipeline_gate.steps[DrainReason.VERIFY]
        counts.trials += 1
        counts.verifying_steps += verified
        counts.drafted += stats.speculation.drafted
        counts.accepted += stats.speculation.accepted
        counts.preemptions += stats.preemptions
        counts.refusals += self._refusals


@cache
def roomy(folder: Path, settings: tuple[tuple[str, Any], ...]) -> Driver:
    """An engine with room for everything. It computes forced tokens one by one."""
    roomy = {"tokens": 8192, "max_rows": 8, "prefill_budget": 64, "prefix_cache": False, "speculate": False}
    driver = Driver(folder, **roomy | dict(settings))
    driver.core.scheduler.set_drafts = lambda job_id, tokens: None  # type: ignore[method-assign]
    if driver.core.model.images is not None:
        show(driver)
    return driver
