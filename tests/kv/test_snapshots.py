"""Snapshots: where they hang, which goes when there are too many, and what the next step is told."""

from __future__ import annotations

from cortexmlx.kv.snapshots import NO_STATE_OPS, Home, RowSnapshot, SnapshotRegistry, StateOps

ROW = (7, 0)


def test_the_one_that_was_not_used_for_the_longest_time_goes() -> None:
    snapshots, home = SnapshotRegistry(3), Home()
    first, second, third = (snapshots.make(home, place) for place in (4, 8, 12))
    assert first and second and third
    snapshots.order.mark_used(first)
    fourth = snapshots.make(home, 16)
    assert home == {4: first, 12: third, 16: fourth}
    assert snapshots.make(home, 12) is None, "it is there"
    snapshots.make(home, 20)
    assert set(home) == {12, 16, 20}, "who would have made it, used it"
    assert snapshots.take_ops().drops == (second, first)
    snapshots.check_invariants([home])


def test_none_is_made_where_none_may_be() -> None:
    snapshots, home = SnapshotRegistry(0), Home()
    assert snapshots.make(home, 4) is None and home == {}
    assert snapshots.take_ops() == NO_STATE_OPS


def test_a_home_that_goes_takes_its_snapshots_along() -> None:
    snapshots, home, other = SnapshotRegistry(9), Home(), Home()
    made = [snapshots.make(home, place) for place in (1, 2)]
    kept = snapshots.make(other, 1)
    snapshots.drop_all(home)
    assert (home, other, snapshots.numbers()) == ({}, {1: kept}, {kept})
    assert snapshots.take_ops().drops == tuple(made)


def test_a_snapshot_moves_unless_there_is_one() -> None:
    snapshots, home, entry = SnapshotRegistry(9), Home(), Home()
    one, two = snapshots.make(home, 5), snapshots.make(home, 6)
    there = snapshots.make(entry, 2)
    snapshots.move(home, 5, entry, 1)
    snapshots.move(home, 6, entry, 2)
    assert (home, entry) == ({}, {1: one, 2: there})
    snapshots.check_invariants([home, entry])
    snapshots.drop_all(entry)
    assert snapshots.take_ops().drops == (two, there, one)


def test_the_next_step_is_told_once_and_not_of_what_is_gone() -> None:
    snapshots, home = SnapshotRegistry(9), Home()
    kept, gone, cut = (snapshots.make(home, place) for place in (3, 4, 5))
    assert kept and gone and cut
    snapshots.save_row(ROW, 3, kept)
    snapshots.save_row(ROW, 4, gone)
    snapshots.begin_row((8, 0), 3, kept)
    snapshots.end_row(ROW)
    other = Home()
    snapshots.move(home, 4, other, 4)
    snapshots.drop_all(other)
    cuts = (RowSnapshot(ROW, 5, cut), RowSnapshot(ROW, 4, gone))
    ops = StateOps(
        (RowSnapshot(ROW, 3, kept),), (RowSnapshot((8, 0), 3, kept),), (gone,), (ROW,), (RowSnapshot(ROW, 5, cut),)
    )
    assert snapshots.take_ops(cuts) == ops
    assert snapshots.take_ops() == NO_STATE_OPS


def test_a_row_still_begins_with_a_snapshot_that_has_to_go_for_another_in_the_same_step() -> None:
    snapshots, home = SnapshotRegistry(1), Home()
    turn = snapshots.make(home, 3)
    assert turn
    snapshots.save_row(ROW, 3, turn)
    snapshots.begin_row((8, 0), 3, turn)
    assert snapshots.make(home, 9), "the end of the next prompt"
    assert snapshots.take_ops() == StateOps((RowSnapshot(ROW, 3, turn),), (RowSnapshot((8, 0), 3, turn),), (turn,))
