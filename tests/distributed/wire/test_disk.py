"""What is said about the disk tier: a load names what each rank has read, and no byte of a block is sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cortexmlx.disk.segments import Record
from cortexmlx.disk.tier import STATE, PieceLoad
from cortexmlx.distributed.wire.messages import CALL, NAME_BYTES, Call, Dispatch, RankPiece, part_key
from cortexmlx.errors import HostLost
from cortexmlx.scheduling.plan import StepKind, StepPlan

EMPTY = np.zeros(0, np.int32)
PLAN = StepPlan(7, StepKind.FLUSH, (), EMPTY, None, EMPTY, EMPTY, (), EMPTY, None, None, (), 0, 0, (3,), None)


def test_a_load_from_disk_names_what_each_rank_has_read() -> None:
    loads = (PieceLoad(0, 7, RankPiece(3, 2, held="not sent")), PieceLoad(STATE, 1, RankPiece(3, 0)))
    message = CALL.encode(Call(1, Dispatch(replace(PLAN, loads=loads))))
    back = CALL.decode(bytes(message)).asks
    assert isinstance(back, Dispatch) and isinstance(back.plan, StepPlan) and back.plan.loads == loads
    assert all(load.content.held is None for load in back.plan.loads)  # type: ignore[attr-defined]
    with pytest.raises(HostLost, match="does not have it"):
        _ = loads[0].content.arrays


def test_the_bytes_of_a_block_are_not_sent() -> None:
    block = Record(b"k" * 16, (1,), (np.zeros(3, np.float32),))
    with pytest.raises(TypeError, match="cannot be sent"):
        CALL.encode(Call(1, Dispatch(replace(PLAN, loads=(PieceLoad(0, 1, block),)))))


def test_the_parts_of_a_piece_have_keys_of_their_own() -> None:
    piece = bytes(range(16))
    keys = [part_key(piece, rank) for rank in range(64)]
    assert len(set(keys)) == 64 and {len(key) for key in keys} == {16}
    assert {key[:NAME_BYTES] for key in keys} == {piece[:NAME_BYTES]}
