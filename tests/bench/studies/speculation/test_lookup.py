"""What a lookup costs, and how often its drafts are right."""

from __future__ import annotations

import pytest

from cortexmlx.bench.studies.speculation import lookup
from cortexmlx.speculation.suffix import EARLIER, RESUMED


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_a_text_that_is_said_again_is_drafted_right() -> None:
    text = list(range(290))
    right = lookup.right_of(iter([(text, text)]))
    assert right.tokens == 290 and right.accepted == 290 - right.steps
    assert right.steps == 2 + 288 // 16, "two tokens come alone, then each draft brings 15 and one more"
    assert sum(drafts for drafts, _, _ in right.by_likeness.values()) == right.steps - 2


def test_a_text_without_repetition_has_no_drafts() -> None:
    right = lookup.right_of(iter([(range(100), range(100, 200))]))
    assert (right.steps, right.drafted, right.accepted) == (100, 0, 0)


@pytest.mark.parametrize("kind", ["follows", "nothing", "breaks"])
def test_a_step_is_timed(kind: str) -> None:
    assert lookup.step_microseconds(50, kind, rows=2, steps=5) > 0


def test_indexing_is_timed() -> None:
    stored, part, whole = lookup.index_milliseconds(5000)
    assert stored > 0 and 0 < part <= whole


def test_ended_texts_take_few_bytes_a_token() -> None:
    empty, more = lookup.bytes_of(20, 500)
    assert 4 << 20 < empty < 5 << 20
    assert 4 * 20 * 500 < more < 8 * 20 * 500


def test_the_texts_are_edits_prose_and_records() -> None:
    before, after = next(lookup.edits(encode))
    assert before != after and len(after) > 500
    assert all(len(answer) == 800 for _, answer in lookup.prose(encode))
    assert len(list(lookup.records(encode))) == 10
    assert len(list(lookup.turns(encode))) == 2 * len(list(lookup.edits(encode)))


def test_likenesses_have_names() -> None:
    assert [lookup.kind_of(each) for each in (0, EARLIER + 3, RESUMED + 6)] == ["own 2", "earlier 5-6", "resumed 16+"]
