"""A trial: random requests with adapters, while adapters are loaded, renamed and unloaded, beside engines that have
nothing but one of these adapters, put into the model by mlx-lm.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cortexmlx.core.core import EngineCore
from cortexmlx.types.request import Completion
from support.adapters.kinds import Adapted, content
from support.engine.core_driver import Driver
from support.speculation.counts import Counts
from support.speculation.kinds import Kind
from support.speculation.trial import Trial, roomy

SLOTS = ("sql", "chat", "poem")
"""Names of adapters. What they stand for changes."""


class AdaptedTrial(Trial):
    """One engine with a random configuration. Everything follows from the seed."""

    def __init__(self, seed: int, of: Adapted, requests: int = 12, store: Path | None = None) -> None:
        super().__init__(seed, of.kind, requests, store)
        self._folders = of.adapters
        self._contents = [content(folder) for folder in of.adapters]
        chosen = self.dice.choice([1, 2, 5])
        among = [None, *self.dice.sample(range(len(of.adapters)), chosen)]
        self._asked_for = [self.dice.choice(among) for _ in self.asked]
        """The content of each request's adapter; None: the base model."""
        for asked in self.asked:
            if self.dice.random() < 0.5:  # the same text with several adapters
                asked.prompt = list(self.asked[0].prompt)
        self._stands_for: dict[str, int] = {}

    def _of_request(self, number: int) -> tuple[str, Kind]:
        where, which = super()._of_request(number)[0], self._asked_for[number]
        kind = self.kind if which is None else replace(self.kind, adapter=self._folders[which])
        return f"{where}, adapter {which}", kind

    def _count(self, driver: Driver, counts: Counts) -> None:
        super()._count(driver, counts)
        self._check(driver.core)

    def _without(self) -> list[Completion]:
        """The answers of engines that have one adapter each, and verify nothing."""
        settings = tuple(self._settings().items())
        answers = {}
        for which in set(self._asked_for):
            own = () if which is None else (("adapter", str(self._folders[which])),)
            driver = roomy(self.kind.folder, settings + own)
            mine = [number for number, other in enumerate(self._asked_for) if other == which]
            handles = [self.asked[number].add(driver, every=True) for number in mine]
            driver.finish()
            answers |= {number: driver.result(handle) for number, handle in zip(mine, handles, strict=True)}
        return [answers[number] for number in range(len(self.asked))]

    def _come_and_go(self, driver: Driver, step: int) -> None:
        core, dice = driver.core, self.dice
        for number, asked in enumerate(self.asked):
            if asked.arrives == step:
                name = self._name_of(core, self._asked_for[number])
                self._handles[number] = handle = asked.add(driver, adapter=name)
                self._numbers[handle.id] = number
            if asked.cancelled == step:
                core.cancel(self._handles[number].id)
        if dice.random() < 0.05:
            self._load(core, dice.choice(SLOTS), dice.randrange(len(self._contents)))
        if self._stands_for and dice.random() < 0.05:
            name = dice.choice(list(self._stands_for))
            core.adapters.unload(name, core.scheduler.jobs)
            del self._stands_for[name]
        self._check(core)

    def _name_of(self, core: EngineCore, which: int | None) -> str | None:
        """A name that stands for an adapter now. One is loaded in the place of another, if need be."""
        if which is None:
            return None
        name = next((name for name, other in self._stands_for.items() if other == which), None)
        if name is None:
            name = self.dice.choice(SLOTS)
            self._load(core, name, which)
        return name

    def _load(self, core: EngineCore, name: str, which: int) -> None:
        info = core.adapters.load(name, self._contents[which], core.scheduler.jobs)
        assert info.digest == self._contents[which].digest.hex()
        self._stands_for[name] = which

    def _check(self, core: EngineCore) -> None:
        """Memory holds what has a name or a request, and nothing else."""
        keys = [job.request.adapter_key for job in core.scheduler.jobs]
        used = {key.digest for key in keys if key is not None}
        named = {self._contents[which].digest for which in self._stands_for.values()}
        assert set(core.adapters.infos) == set(self._stands_for)
        assert set(core.adapters._contents) == used | named, f"{self.where}: an adapter is gone, or stays for nobody"
