"""Trials with what meets recurrent layers: conversations with edits, few snapshots of states, draft heads that are
right by luck, a store from which a second engine begins, and adapters.
"""

from __future__ import annotations

from pathlib import Path

from cortexmlx.speculation.drafter import HeadQuery
from cortexmlx.types.request import Completion
from support.adapters.trial import AdaptedTrial
from support.engine.core_driver import Driver
from support.speculation.counts import Counts
from support.speculation.kinds import Kind
from support.speculation.trial import Trial, roomy

MAX_TURN = 60
"""How many tokens of a conversation come before an answer at most: with the answer, they fit into a tight arena."""


class MixedTrial(Trial):
    """A trial of a model with recurrent layers, perhaps with a draft head. With a store, two engines live one after the
    other.
    """

    def run(self, counts: Counts) -> None:
        self._luck = self.dice.choice([0.0, 0.5, 0.9, 1.0, None])  # how often a head is right; None: as it is
        self._pause = self.dice.choice([1, 1, 7, 40])  # after so many steps with drafts come as many without
        self._steps = 0
        marks = ["disk tier"] * (self.store is not None) + ["dropped tokens"] * (self.keep is not None)
        marks += ["refused memory"] * self.refuses
        before, preempted = counts.answers, counts.preemptions
        for _ in range(1 if self.store is None else 2):
            self._handles.clear()
            self._numbers.clear()
            super().run(counts)
        marks += ["preempting engine"] * (counts.preemptions > preempted) + self._marks()
        for mark in marks:
            counts.asked[mark] += counts.answers - before

    def _marks(self) -> list[str]:
        return [f"head right {self._luck}"] if "head" in self.kind.name else []

    def _driver(self) -> Driver:
        driver = super()._driver()
        snapshots = driver.core.cache.states.snapshots
        if snapshots is not None:
            snapshots.max_snapshots = self.dice.choice([int(self.store is not None), 1, 2, 3, 8, 32])  # 0: no store
        return driver

    def _come_and_go(self, driver: Driver, step: int) -> None:
        super()._come_and_go(driver, step)
        if "head" in self.kind.name and self.dice.random() < 0.4:  # so that a head can be asked
            driver.core.drain()

    def _draft(self, driver: Driver, wanted: list[Completion]) -> None:
        """Rows get a guess, or what the head says, which is made right or wrong."""
        self._steps += 1
        if self._pause > 1 and self._steps // self._pause % 2:
            return
        super()._draft(driver, wanted)
        core, dice = driver.core, self.dice
        if "head" not in self.kind.name or core._in_flight:
            return
        jobs = [job for job in core.scheduler.draftable_jobs if dice.random() < 0.8]
        rows = [(job.id, job.generation, len(job.tokens) - 2, job.tokens[-1], job.position_shift) for job in jobs]
        query = HeadQuery(rows, dice.randint(1, 6), core.scheduler.locate_rows(jobs))
        for job, proposed in zip(jobs, core.runner.propose(query) if jobs else (), strict=True):
            first = wanted[self._numbers[core.requests.answers[job.id].group.handle.id]]
            whole = (first, *first.others)[core.requests.answers[job.id].index].token_ids
            tokens = list(proposed)
            for place, right in enumerate(whole[job.num_generated :][: len(tokens)]):
                if self._luck is not None:
                    tokens[place] = right if dice.random() < self._luck else dice.randrange(300)
            if tokens:
                core.scheduler.set_drafts(job.id, tokens)
        core.scheduler.set_head_awake(dice.random() < 0.8)


class TalkTrial(MixedTrial):
    """Some requests go on with the answer to another, as it was or edited."""

    def __init__(self, seed: int, kind: Kind, requests: int = 10, store: Path | None = None) -> None:
        super().__init__(seed, kind, requests, store)
        chances = [0.0, *[0.5] * (requests - 1)]
        self._goes_on = {n: self.dice.randrange(n) for n, p in enumerate(chances) if self.dice.random() < p}
        for number in self._goes_on:
            self.asked[number].arrives, self.asked[number].cancelled = -1, None

    def _marks(self) -> list[str]:
        return [*super()._marks(), "conversations"]

    def _without(self) -> list[Completion]:
        driver = roomy(self.kind.folder, tuple(self._settings().items()))
        answers: dict[int, Completion] = {}
        while len(answers) < len(self.asked):
            handles = {}
            for number, asked in enumerate(self.asked):
                earlier = self._goes_on.get(number)
                if number not in answers and (earlier is None or earlier in answers):
                    if earlier is not None and asked.arrives == -1:
                        asked.prompt, asked.arrives = self._turn(earlier, answers[earlier]), -2
                    handles[number] = asked.add(driver, every=True)
            driver.finish()
            answers |= {number: driver.result(handle) for number, handle in handles.items()}
        return [answers[number] for number in range(len(self.asked))]

    def _turn(self, earlier: int, answer: Completion) -> list[int]:
        """What comes next in a conversation: sometimes its answer was changed, or its question, or taken back."""
        dice, prompt = self.dice, self.asked[earlier].prompt
        text = [*prompt, *dice.choice([answer, *answer.others]).token_ids][: MAX_TURN - 3]
        edit = dice.random()
        if edit < 0.2 and len(text) > len(prompt):
            text[dice.randrange(len(prompt), len(text))] = dice.randrange(256)
        elif edit < 0.3:
            text[dice.randrange(len(text))] = dice.randrange(256)
        elif edit < 0.5:
            del text[dice.randint(1, len(text)) :]
        return text + [dice.randrange(256) for _ in range(dice.randint(0, 3))]

    def _come_and_go(self, driver: Driver, step: int) -> None:
        for number, earlier in self._goes_on.items():
            if number not in self._handles and earlier in self._handles and self._handles[earlier].ended:
                asked = self.asked[number]
                self._handles[number] = handle = asked.add(driver)
                self._numbers[handle.id] = number
                asked.cancelled = step + self.dice.randint(1, 9) if self.dice.random() < 0.06 else None
        super()._come_and_go(driver, step)

    def _drive(self, driver: Driver, wanted: list[Completion]) -> None:
        for number in self._goes_on:
            self.asked[number].cancelled = None
        super()._drive(driver, wanted)


class MixedAdaptedTrial(MixedTrial, AdaptedTrial):
    """The same with adapters, which come and go."""

    def _driver(self) -> Driver:
        self._stands_for.clear()
        return super()._driver()

    def _marks(self) -> list[str]:
        return [*super()._marks(), "adapters"]
