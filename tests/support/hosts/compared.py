"""The answers of ranks, compared with those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cortexmlx.types.sampling_params import SamplingParams
from support.engine.core_driver import Driver
from support.hosts.parts.script import Asked, Script
from support.speculation.near_ties import plain_row, tie_size


def alone(model: Path, script: Script) -> list[list[int]]:
    """The answers of one process, which has the whole model."""
    driver = Driver(model, **script.config)
    try:
        return script.run(driver)
    finally:
        driver.core.release()


def same_tokens(model: Path, script: Script, want: Sequence[list[int]], ranks: Sequence[dict[str, Any]]) -> None:
    """All ranks have the same answers, and they are `want`, up to a proven tie in each."""
    assert [rank.get("error") for rank in ranks] == [None] * len(ranks)
    assert all(rank["tokens"] == ranks[0]["tokens"] for rank in ranks)
    for asked, mine, theirs in zip(script.asked, ranks[0]["tokens"], want, strict=True):
        assert len(mine) == len(theirs)
        place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if place is not None:
            assert _tied(model, asked, theirs[:place], (mine[place], theirs[place])), (mine, theirs)


def _tied(model: Path, asked: Asked, before: list[int], candidates: tuple[int, int]) -> bool:
    """Whether rounding alone may decide between two tokens. Where a form is enforced, that is not looked at."""
    if "structured" in asked.params:
        return False
    import mlx_lm

    row = plain_row(SamplingParams(**asked.params), asked.seed, asked.prompt, before)
    return tie_size(mlx_lm.load(str(model))[0], [*asked.prompt, *before], row, None, candidates) is not None
