"""What several parts of a model have room for together: the smallest arena decides, and block tables are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.distributed.group import Part, align_groups, common_capacity, join_groups
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import ArenaDemand, arena_blocks, bytes_per_token, row_state_bytes, split_memory
from cortexmlx.kv.spec import KVSpec, LayerGroup, paged_groups

FULL = KVSpec(2, 16, 16, "float16")
WINDOW = replace(FULL, window=48)
WIDE = replace(FULL, kv_heads=4)
STATE = KVSpec(0, 0, 0, "float32", row_bytes=4096)
LOAD = ArenaDemand(rows=4, prefill_budget=64, block_size=16)


def test_tensor_parts_are_equal_and_their_bytes_add_up() -> None:
    part = (LayerGroup(FULL, (0, 2)), LayerGroup(WINDOW, (1, 3)))
    parts = align_groups([part, part])
    assert parts == (part, part)
    assert bytes_per_token(join_groups(parts)) == 2 * bytes_per_token(part)
    assert common_capacity(parts, [1 << 20, 1 << 19], LOAD, 4096).blocks == arena_blocks(1 << 19, part, LOAD)


def test_a_stage_without_layers_of_a_group_has_the_group_and_sets_no_limit_to_it() -> None:
    first, second = (LayerGroup(WINDOW, (0, 1)),), (LayerGroup(FULL, (0,)), LayerGroup(WINDOW, (1,)))
    parts = align_groups([first, second])
    assert [[g.spec for g in part] for part in parts] == [[WINDOW, FULL]] * 2
    assert [len(g.layers) for g in parts[0]] == [2, 0]
    room = common_capacity(parts, [1 << 24, 1 << 20], LOAD, 4096)
    assert room.blocks[1] == arena_blocks(1 << 20, parts[1], LOAD)[1]


def test_groups_that_see_equally_far_have_equally_many_blocks_also_on_different_ranks() -> None:
    parts = align_groups([(LayerGroup(FULL, (0,)),), (LayerGroup(WIDE, (0,)),)])
    narrow = arena_blocks(1 << 20, [LayerGroup(WIDE, (0,))], LOAD)[0]
    assert common_capacity(parts, [1 << 20, 1 << 20], LOAD, 4096).blocks == (narrow, narrow)


def test_states_have_as_many_snapshots_as_the_poorest_rank_can_keep() -> None:
    parts = align_groups([(LayerGroup(STATE, (0, 1)),), (LayerGroup(FULL, (0,)), LayerGroup(STATE, (1,)))])
    memory = [1 << 15, 1 << 20]
    room = common_capacity(parts, memory, LOAD, 4096)
    assert room.snapshots == min(split_memory(p, m, LOAD.rows)[1] for p, m in zip(parts, memory, strict=True))


def test_a_model_of_states_alone_has_blocks_that_only_count_tokens() -> None:
    parts = align_groups([(LayerGroup(STATE, (0,)),)] * 2)
    assert common_capacity(parts, [1 << 20] * 2, LOAD, 100).blocks == (4 * 7,)


def test_a_rank_that_holds_no_block_is_refused_with_the_numbers() -> None:
    part = (LayerGroup(FULL, (0,)),)
    with pytest.raises(InvalidRequest, match="holds no block"):
        common_capacity((part, part), [1 << 20, 100], LOAD, 4096)


specs = st.sampled_from([FULL, WINDOW, WIDE, replace(WIDE, window=48), STATE])
some_parts = st.lists(st.dictionaries(specs, st.integers(1, 4), min_size=1), min_size=1, max_size=4)


@given(some_parts, st.lists(st.integers(1 << 18, 1 << 22), min_size=4, max_size=4))
def test_every_rank_can_pay_for_the_room(each: list[dict[KVSpec, int]], memory: list[int]) -> None:
    own: list[Part] = [tuple(LayerGroup(s, tuple(range(n))) for s, n in part.items()) for part in each]
    parts = align_groups(own)
    memory = memory[: len(parts)]
    room = common_capacity(parts, memory, LOAD, 512)
    groups = paged_groups(join_groups(parts))
    assert len(room.blocks) == len(groups) and min(room.blocks) > 0
    windows = [group.spec.attention_window for group in groups]
    assert len(set(zip(windows, room.blocks, strict=True))) == len(set(windows))
    for part, bytes_ in zip(parts, memory, strict=True):
        layers = {group.spec: len(group.layers) for group in part}
        pairs = zip(groups, room.blocks, strict=True)
        taken = sum(n * LOAD.block_size * g.spec.bytes_per_token * layers.get(g.spec, 0) for g, n in pairs)
        assert taken + (room.snapshots or 0) * row_state_bytes(part) <= bytes_
