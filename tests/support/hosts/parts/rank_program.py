"""One rank of a group: `python -m support.hosts.parts.rank_program BACKEND JOBS RESULTS`.

JOBS is a file of models, ways to cut them, and scripts. Each rank writes what it answered to a file of its own.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cortexmlx.cpu import blas

blas.preload()

import mlx.core as mx  # noqa: E402

from cortexmlx.core import core as core_module  # noqa: E402
from cortexmlx.distributed.messages import Cut  # noqa: E402
from cortexmlx.scheduling.plan import StepKind, StepPlan  # noqa: E402
from support.engine import core_driver  # noqa: E402
from support.hosts.parts.rank_model import RankModel  # noqa: E402
from support.hosts.parts.script import Script  # noqa: E402

COLLECTIVES = ("all_sum", "all_gather", "send", "recv", "recv_like")


class Collectives:
    """How many operations of each kind between ranks the passes of decode steps have."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()
        for name in COLLECTIVES:
            setattr(mx.distributed, name, self._counted(name, getattr(mx.distributed, name)))

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any, **others: Any) -> Any:
            self.made[name] += 1
            return original(*inputs, **others)

        return call


def main(backend: str, jobs: Path, results: Path) -> None:
    """Run every job on this rank's part of its model."""
    group = mx.distributed.init(strict=True, backend=backend)
    collectives = Collectives()
    answers = [answered(job, group, collectives) for job in json.loads(jobs.read_text())]
    (results / f"{group.rank()}.json").write_text(json.dumps(answers))


def answered(job: dict[str, Any], group: mx.distributed.Group, collectives: Collectives) -> dict[str, Any]:
    """What one job came to: the tokens, and the operations between ranks of one decode step."""
    script = Script.of(job["script"])
    config = dict(script.config)
    tokens, snapshots = config.pop("tokens", 512), config.pop("snapshots", 16)

    def opened(config: Any, *_: Any) -> RankModel:
        model = RankModel(config, Cut(job["cut"]), group)
        model.open_cache(tokens, snapshots)
        return model

    core_module.open_model = opened  # type: ignore[assignment]
    core_driver._sizes = lambda *_: (1, 1, False)
    try:
        driver = core_driver.Driver(Path(job["model"]), **config)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    steps: list[Counter[str]] = []
    runner, pass_ = driver.core.runner, driver.core.runner.dispatch

    def dispatch(plan: StepPlan) -> Any:
        before = collectives.made.copy()
        answer = pass_(plan)
        if plan.kind is StepKind.DECODE:
            steps.append(collectives.made - before)
        return answer

    runner.dispatch = dispatch
    answers = script.run(driver)
    stats = driver.core.stats()
    driver.core.release()
    return {
        "tokens": answers,
        "collectives": dict(steps[-1]) if steps else {},
        "preemptions": stats.preemptions,
        "cached_tokens": stats.cached_tokens,
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
