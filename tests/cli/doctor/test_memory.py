"""The lines about copies of the KV cache and about the GPU's queue."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.cli.doctor.check import Verdict
from cortexmlx.cli.doctor.memory import memory_checks
from cortexmlx.stats import ArenaWrites, CommandBuffers


def stats(writes: ArenaWrites, buffers: CommandBuffers | None = None) -> Any:
    return type("Stats", (), {"arena_writes": writes, "command_buffers": buffers})


@pytest.mark.parametrize(
    ("writes", "verdict", "says"),
    [
        (ArenaWrites(), Verdict.OK, "not measured"),
        (ArenaWrites(60), Verdict.OK, "in place in all of 60 measured writes"),
        (ArenaWrites(60, 2, 8 << 20), Verdict.WARN, "2 of 60 measured writes copied a part of it, 8 MiB"),
    ],
)
def test_copies_are_warned_of_with_their_size(writes: ArenaWrites, verdict: Verdict, says: str) -> None:
    [check] = memory_checks(stats(writes))
    assert check.verdict is verdict and says in check.detail


def test_a_cut_queue_is_warned_of_with_the_variables_that_mend_it() -> None:
    _, cut = memory_checks(stats(ArenaWrites(), CommandBuffers(30, 50, 50, 1 / 3)))
    assert cut.verdict is Verdict.WARN and "about 30 a step" in cut.detail and "33% of a step" in cut.detail
    assert "MLX_MAX_OPS_PER_BUFFER" in cut.advice and "MLX_MAX_MB_PER_BUFFER" in cut.advice
    _, whole = memory_checks(stats(ArenaWrites(), CommandBuffers(6, 100, 1_000_000, 1.0)))
    assert whole.verdict is Verdict.OK and not whole.advice and "1,000,000 Mi elements" in whole.detail
