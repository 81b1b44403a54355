"""What is asked of a core, and when, as plain data: the same in one process and in every rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from cortexmlx.scheduling.job import Job
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of
from support.speculation.guided import guide


@dataclass(frozen=True)
class Asked:
    """A request: `after` steps since the one before."""

    prompt: list[int]
    max_tokens: int = 24
    after: int = 0
    seed: int = 0
    params: dict[str, Any] = field(default_factory=dict)
    cancel_after: int | None = None
    """Steps after which it is cancelled."""


@dataclass(frozen=True)
class Script:
    """Requests to a core with the settings `config`."""

    asked: list[Asked]
    config: dict[str, Any] = field(default_factory=dict)
    drafts: int = 0
    """How many tokens are guessed for every answer before every step, out of `guesses`."""
    guesses: list[list[int]] = field(default_factory=list)
    """What each answer is guessed to be."""

    def plain(self) -> dict[str, Any]:
        """The script as what JSON has."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Script:
        """The inverse of `plain`."""
        return cls(**plain | {"asked": [Asked(**each) for each in plain["asked"]]})

    def run(self, driver: Driver) -> list[list[int]]:
        """Ask everything, and return the tokens of the answers."""
        if self.drafts:
            guide(driver, self._guess)
        handles: list[Any] = []
        ends: list[tuple[int, Any]] = []
        steps = 0
        for each in self.asked:
            for _ in range(each.after):
                driver.step()
                steps += 1
            handles.append(driver.add(each.prompt, each.max_tokens, each.seed, **each.params))
            if each.cancel_after is not None:
                ends.append((steps + each.cancel_after, handles[-1]))
        for when, handle in sorted(ends, key=lambda end: end[0]):
            driver.step(max(when - steps, 0))
            steps = max(when, steps)
            driver.core.cancel(handle.id)
        driver.finish()
        return [list(driver.result(handle).token_ids) for handle in handles]

    def _guess(self, job: Job) -> list[int]:
        """What follows in the guess of the answer; every third token of it is wrong."""
        answer, done = self.guesses[job.id], len(job.tokens) - job.prompt_length
        return [token ^ (place % 3 == 0) for place, token in enumerate(answer) if done <= place < done + self.drafts]


def hardships(guesses: list[list[int]]) -> dict[str, Script]:
    """What may happen to answers on their way. `guesses` are those of `ragged(seeded=True)`."""
    person = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 5}},
        "required": ["a", "b"],
    }
    formed = {"temperature": 0.7, "structured": person, "ignore_eos": False}
    picky = {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2, "top_k": 12}
    prompts = [tokens_of(9 + 7 * i, seed=i) for i in range(5)]
    return {
        "greedy": Script(ragged()),
        "seeded": Script(ragged(seeded=True)),
        "preempted": Script(ragged(seeded=True), {"tokens": 112, "max_rows": 8}),
        "drafted": Script(ragged(seeded=True), {"forced_tokens": False}, drafts=3, guesses=guesses),
        "structured": Script(
            [Asked(p, 32, after=i, seed=i, params=formed if i % 2 else {}) for i, p in enumerate(prompts)]
        ),
        "cancelled": Script(
            [
                Asked(p, 30, after=1, seed=i, params=picky, cancel_after=6 + i if i % 2 else None)
                for i, p in enumerate(prompts)
            ]
        ),
    }


def ragged(seeded: bool = False) -> list[Asked]:
    """Prompts of many lengths at different times; some begin alike."""
    common = tokens_of(24, seed=77)
    params = {"temperature": 0.8, "top_p": 0.9} if seeded else {"temperature": 0.0}
    lengths = (3, 17, 32, 9, 26, 40)
    return [
        Asked([*common[: n // 2], *tokens_of(n - n // 2, seed=n)], 20, after=2 * i, seed=i, params=params)
        for i, n in enumerate(lengths)
    ]
