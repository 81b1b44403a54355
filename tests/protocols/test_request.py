"""What names a request in all runs of a batch."""

from __future__ import annotations

from cortexmlx.protocols.request import key_of


def test_ids_of_another_kind_and_lines_without_one_have_other_names() -> None:
    keys = [key_of(2, 9), key_of("2", 9), key_of(None, 2), key_of("line 2", 9), key_of('"2"', 9)]
    assert len(set(keys)) == 5 and key_of(2, 1) == keys[0]
