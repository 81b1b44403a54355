"""Long answers that do not end before a test wants it, however late the test's own thread gets a core."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cortexmlx.types.request import RequestState


def hold_long_answers(engine: Any, tokens: int = 20) -> Callable[[], None]:
    """Let `engine` take no step while every row has `tokens` tokens of its answer. Return what lets it go on.

    Shorter answers end as always, beside held ones, too. The engine still answers questions, cancels and closes.
    """

    def hold(core: Any) -> None:
        step = core.step

        def held() -> None:
            jobs = [answer.job for answer in core.requests.answers.values()]
            rows = [job for job in jobs if job.state is not RequestState.WAITING]
            nobody_begins = len(rows) in (len(jobs), core.scheduler.config.max_rows)
            if rows and nobody_begins and all(job.num_generated >= tokens for job in rows):
                time.sleep(0.001)
            else:
                step()

        core.step = held

    def let_go(core: Any) -> None:
        vars(core).pop("step", None)

    engine.inspect(hold)
    return lambda: engine.inspect(let_go)
