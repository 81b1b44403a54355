"""A text is begun at the latest snapshot within what is cached of it, and nowhere else; without states, not behind a
gap.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from cortexmlx.kv import snapshots as resume_points
from cortexmlx.kv.prefix import PrefixCache, PrefixEntry, PrefixMatch
from cortexmlx.kv.snapshots import (
    cut_at_block_snapshots,
    cut_at_snapshots,
    cut_before_missing_blocks,
    drop_partial_block,
)
from cortexmlx.kv.spec import AttentionWindow

SIZE = 4
TEXT = list(range(100, 120))


def chain(*states: dict[int, int]) -> tuple[PrefixCache, list[PrefixEntry]]:
    """The blocks of TEXT that are cached, with these snapshots in them; the last may be partial."""
    prefix, entries = PrefixCache(SIZE), []
    parent = root = prefix.root()
    for index, homes in enumerate(states):
        entry = prefix.insert(parent, TEXT[index * SIZE : (index + 1) * SIZE], (index,))
        assert entry is not None
        entry.states.update(homes)
        entries.append(entry)
        parent = entry
    assert root.children
    return prefix, entries


def begun(prefix: PrefixCache, text: list[int], most: int | None = None) -> PrefixMatch:
    most = len(text) - 1 if most is None else most
    match = prefix.match(text, prefix.keys(text), most)
    return next(cut_at_snapshots(match, text[match.chain : min(match.chain + SIZE, most)], SIZE))


def test_the_latest_snapshot_of_all_is_taken() -> None:
    prefix, entries = chain({4: 1}, {2: 2, 4: 3}, {}, {1: 4})
    match = begun(prefix, TEXT[:14])
    assert (match.entries, match.partial, match.partial_tokens, match.snapshot) == (
        tuple(entries[:3]),
        entries[3],
        1,
        4,
    )
    match = begun(prefix, TEXT[:13])
    assert (match.entries, match.partial, match.snapshot, match.chain) == (tuple(entries[:2]), None, 3, 12)
    match = begun(prefix, TEXT[:7])
    assert (match.entries, match.partial, match.partial_tokens, match.snapshot) == (
        tuple(entries[:1]),
        entries[1],
        2,
        2,
    )


def test_without_a_snapshot_nothing_is_begun_from() -> None:
    prefix, _ = chain({}, {}, {})
    match = begun(prefix, TEXT[:11])
    assert (match.entries, match.partial, match.partial_tokens, match.snapshot, match.chain) == ((), None, 0, None, 8)


def test_a_snapshot_behind_where_texts_part_does_not_count() -> None:
    prefix, entries = chain({4: 1}, {2: 2, 3: 3, 4: 4})
    match = begun(prefix, [*TEXT[:6], 1, 2, 3])
    assert (match.partial, match.partial_tokens, match.snapshot) == (entries[1], 2, 2)
    match = begun(prefix, [*TEXT[:5], 1, 2, 3])
    assert (match.entries, match.partial, match.snapshot) == (tuple(entries[:1]), None, 1)


def test_of_several_successors_the_one_with_the_latest_snapshot_counts() -> None:
    """The newest has as much in common, but no snapshot."""
    prefix, entries = chain({4: 1})
    old = prefix.insert(entries[0], [*TEXT[4:7], 1], (5,))
    new = prefix.insert(entries[0], [*TEXT[4:7], 2], (6,))
    assert old is not None and new is not None
    old.states[3] = 9
    match = begun(prefix, TEXT[:9])
    assert (match.partial, match.partial_tokens, match.snapshot) == (old, 3, 9)


def test_without_a_partial_block_the_latest_end_of_a_block_is_taken() -> None:
    prefix, entries = chain({4: 1}, {4: 2}, {2: 3}, {1: 4})
    match = next(cut_at_block_snapshots(begun(prefix, TEXT[:14]), SIZE))
    assert (match.entries, match.partial, match.partial_tokens, match.snapshot) == (tuple(entries[:2]), None, 0, 2)
    prefix, _ = chain({1: 4})
    assert next(cut_at_block_snapshots(begun(prefix, TEXT[:4]), SIZE)).snapshot is None


def places(matches: Iterator[PrefixMatch]) -> list[tuple[int, int | None]]:
    """How many tokens each has, and its snapshot."""
    return [(len(match.entries) * SIZE + match.partial_tokens, match.snapshot) for match in matches]


def test_shorter_parts_follow_the_longest_to_the_empty_one() -> None:
    """For whoever cannot begin there, because a window's blocks are gone."""
    prefix, _ = chain({4: 1}, {2: 2, 4: 3}, {}, {1: 4, 3: 5})
    text = TEXT[:17]
    match = prefix.match(text, prefix.keys(text), 15)
    assert places(cut_at_snapshots(match, text[match.chain : 15], SIZE)) == [
        (15, 5),
        (13, 4),
        (8, 3),
        (6, 2),
        (4, 1),
        (0, None),
    ]
    assert places(cut_at_block_snapshots(match, SIZE)) == [(8, 3), (4, 1), (0, None)]
    assert places(iter([drop_partial_block(match)])) == [(12, None)]


@pytest.mark.parametrize(
    "attention_window",
    [
        AttentionWindow(1),
        AttentionWindow(3),
        AttentionWindow(9),
        AttentionWindow(14),
        AttentionWindow(4, True),
        AttentionWindow(6, True),
    ],
)
def test_a_text_without_states_begins_at_the_last_place_that_sees_no_gap(attention_window: AttentionWindow) -> None:
    """Judged by asking every place, from the last on."""
    rng = random.Random(0)
    prefix, _ = chain({}, {}, {}, {})
    for _ in range(100):
        end, gone = rng.randint(0, 16), {place for place in range(4) if rng.random() < 0.5}
        match = prefix.match(TEXT[:16], prefix.keys(TEXT[:16]), end)

        def seen(tokens: int, gone: set[int] = gone) -> list[int]:
            return [
                place
                for place in range(attention_window.oldest_visible(tokens) // SIZE, -(-tokens // SIZE))
                if place in gone
            ]

        found = cut_before_missing_blocks(match, lambda _, tokens: max(seen(tokens), default=None), SIZE)
        wanted = next(n for n in (end, *range(end // SIZE * SIZE, -1, -SIZE)) if not seen(n))
        assert found.matched_tokens(SIZE) == wanted


def test_a_long_match_that_lacks_everything_is_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is matched in many steps: a part made for every block would take the square of a prompt's length."""
    entry = chain({})[1][0]
    match, made, cut = PrefixMatch(entry.parent, (entry,) * 5000, None, 0), [], resume_points._cut_match
    monkeypatch.setattr(resume_points, "_cut_match", lambda *given: made.append(given) or cut(*given))
    found = cut_before_missing_blocks(match, lambda _, tokens: tokens // SIZE - 1 if tokens else None, SIZE)
    assert (found.entries, len(made)) == ((), 1)
