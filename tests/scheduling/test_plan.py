"""Which writes one slice takes."""

from __future__ import annotations

import numpy as np
import pytest

from cortexmlx.scheduling.plan import SCRATCH_SLOT, ArenaWrite


@pytest.mark.parametrize(
    ("slots", "zeros", "run"),
    [
        ([5, 6, 7], [8, 9], 5),
        ([5], [], 5),
        ([5, 6], [8], None),
        ([5, 7], [], None),
        ([6, 5], [], None),
        ([SCRATCH_SLOT, 0, 1], [], None),
        ([], [], None),
    ],
)
def test_a_write_is_one_run_only_if_all_its_slots_follow_each_other(
    slots: list[int], zeros: list[int], run: int | None
) -> None:
    assert ArenaWrite(np.array(slots, np.int32), np.array(zeros, np.int32)).run_start == run
