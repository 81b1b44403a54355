"""The suffix drafter guesses what followed the longest match of a row's last tokens, in texts of the same client."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.speculation.suffix import (
    EARLIER,
    INDEXED_AT_ONCE,
    KEY_TOKENS,
    LONGEST_MATCH,
    OWN,
    RESUME_DISTANCE,
    RESUMED,
    WAYS,
    PlaceTable,
    SuffixDrafter,
)
from support.effort import examples
from support.scheduling.requests import job_of


def guess(drafter: SuffixDrafter, job: Job, budget: int = 4) -> list[int]:
    (draft,) = drafter.propose([job], budget)
    return [] if draft is None else list(draft.tokens)


def confidence_class(drafter: SuffixDrafter, job: Job) -> int:
    (draft,) = drafter.propose([job], 4)
    assert draft is not None
    return draft.confidence_class


def say(drafter: SuffixDrafter, job: Job, tokens: Sequence[int]) -> None:
    for token in tokens:
        drafter.propose([job], 4)
        job.append_token(token)


def ended(drafter: SuffixDrafter, job: Job) -> None:
    drafter.propose([job], 4)
    drafter.end(job)


def test_it_drafts_what_followed_the_same_tokens() -> None:
    assert guess(SuffixDrafter(), job_of(0, [1, 2, 3, 4, 5, 6, 1, 2, 3]), 2) == [4, 5]


def test_it_has_no_guess_for_what_was_never_there() -> None:
    assert SuffixDrafter().propose([job_of(0, [1, 2, 3, 4, 5]), job_of(1, [1])], 4) == [None, None]


def test_the_longest_match_wins_and_then_the_newest() -> None:
    drafter = SuffixDrafter()
    assert guess(drafter, job_of(0, [9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2]), 1) == [3]
    assert guess(drafter, job_of(1, [7, 1, 2, 3, 8, 1, 2, 4, 6, 1, 2]), 1) == [4]
    row = [4, 9, 1, 2, 50, 8, 3, 1, 2, 60, 4, 3, 1, 2]
    assert guess(SuffixDrafter(), job_of(2, row), 1) == [60], "the other place is alike only further back"


def test_other_tokens_with_the_same_hash_are_no_match() -> None:
    drafter, table = SuffixDrafter(), PlaceTable()
    key = drafter.texts.client_texts(None).hash_key
    table.add_place(key, 1, array("i", [1, 2, 3]), 2)
    other = next(token for token in range(3, 1 << 20) if any(table.find_places(key, 1, token)))
    assert guess(drafter, job_of(0, [1, 2, 3, 1, other])) == []


def test_a_long_prompt_keeps_nobody_elses_new_tokens_from_being_found() -> None:
    drafter = SuffixDrafter()
    long = job_of(0, list(range(20 * INDEXED_AT_ONCE)), client="a", salt="a")
    job = job_of(1, [1, 2, 3, 4], client="b", salt="b")
    for token in (8, 5, 6, 7, 1, 5, 6):
        job.append_token(token)
        (_, draft) = drafter.propose([long, job], 2)
    assert draft is not None and list(draft.tokens) == [7, 1]


def test_another_clients_text_pushes_no_place_out() -> None:
    """Else a client could see by its drafts which two tokens another one's texts have. Four tries: each client has a
    hash that nobody can guess, and those of two clients may meet.
    """
    kept = 0
    for _ in range(4):
        drafter = SuffixDrafter()
        ended(drafter, job_of(0, [1, 2, 3, 4, 5], client="a", salt="a"))
        for number, client in enumerate(["b", "b", "c"]):
            ended(drafter, job_of(number + 1, [1, 2] * (WAYS + 1), client=client, salt=client))
        ended(drafter, job_of(4, [1, 2] * (WAYS + 1), cache=False))
        kept += guess(drafter, job_of(5, [9, 1, 2], client="a", salt="a"), 3) == [3, 4, 5]
    assert kept >= 3


def test_a_draft_ends_where_the_known_text_ends() -> None:
    assert guess(SuffixDrafter(), job_of(0, [1, 2, 3, 4, 1, 2]), 15) == [3, 4, 1, 2]


def test_a_row_follows_its_place_and_turns_to_another_when_it_was_wrong() -> None:
    drafter, job = SuffixDrafter(), job_of(0, [1, 2, 3, 4, 5, 6, 9, 9, 4, 7, 1, 2])
    assert guess(drafter, job) == [3, 4, 5, 6]
    job.append_token(3)
    assert guess(drafter, job) == [4, 5, 6, 9]
    for token in (4, 9, 4):
        job.append_token(token)
    assert guess(drafter, job) == [7, 1, 2, 3]


def test_a_place_in_its_own_text_is_followed_into_what_it_said_since() -> None:
    drafter, job = SuffixDrafter(), job_of(0, [5, 6, 5, 6])
    assert guess(drafter, job) == [5, 6]
    for token in (5, 6, 5):
        job.append_token(token)
        assert guess(drafter, job, 1) == [11 - token]


def test_after_an_edit_it_resumes_where_the_text_was_left() -> None:
    """Of two places with the same two tokens before them, the one after the break wins, though the other is newer."""
    prompt = [70, 71, 1, 2, 55, *range(100, 120), 1, 2, 3, 4, 50, 1, 2, 60, 61]
    drafter, job = SuffixDrafter(), job_of(0, prompt)
    say(drafter, job, range(100, 120))
    assert confidence_class(drafter, job) == OWN + 6
    say(drafter, job, [7, 1, 2])
    assert guess(drafter, job, 2) == [3, 4] and confidence_class(drafter, job) == RESUMED
    say(drafter, job, [3])
    assert confidence_class(drafter, job) == RESUMED + 1
    say(drafter, job, [*range(200, 200 + RESUME_DISTANCE), 1, 2])
    assert confidence_class(drafter, job) == OWN, "that was long ago"


def test_an_answer_drafts_from_the_clients_ended_answers() -> None:
    drafter, before = SuffixDrafter(), job_of(0, [1, 2, 3], salt="a")
    say(drafter, before, [4, 5, 6])
    drafter.end(before)
    after = job_of(1, [8, 9, 2, 3, 4], salt="a")
    assert guess(drafter, after) == [5, 6]
    assert confidence_class(drafter, after) == EARLIER + 1


@pytest.mark.parametrize("salt", [None, "b"])
def test_it_reads_no_other_clients_texts(salt: str | None) -> None:
    drafter = SuffixDrafter()
    ended(drafter, job_of(0, [1, 2, 3, 4, 5], salt="a"))
    running = job_of(1, [1, 2, 3, 4, 6], salt="a")
    drafter.propose([running], 4)
    assert guess(drafter, job_of(2, [1, 2, 3], salt=salt)) == []
    assert guess(drafter, job_of(3, [1, 2, 3], salt="a")) == [4, 5]


def test_jobs_that_share_no_prefixes_leave_no_text_and_read_none() -> None:
    drafter = SuffixDrafter()
    ended(drafter, job_of(0, [1, 2, 3, 4, 5], cache=False))
    assert not drafter.texts.texts_by_client
    assert guess(drafter, job_of(1, [1, 2, 3])) == []
    ended(drafter, job_of(2, [1, 2, 3, 4, 5]))
    assert guess(drafter, job_of(3, [1, 2, 3], cache=False)) == []
    assert guess(drafter, job_of(4, [1, 2, 7, 1, 2], cache=False)) == [7, 1, 2]
    alone = SuffixDrafter(share_prefixes=False)
    ended(alone, job_of(0, [1, 2, 3, 4, 5]))
    assert guess(alone, job_of(1, [1, 2, 3])) == []


@pytest.mark.parametrize("cache", [True, False])
def test_a_fork_begins_with_its_parents_text(cache: bool) -> None:
    drafter, prompt = SuffixDrafter(), [*range(100, 160), 1, 2, 3, 4]
    parent = job_of(0, prompt, cache=cache)
    say(drafter, parent, [1, 2])
    fork = job_of(1, prompt, cache=cache, fork_of=parent)
    drafter.propose([fork], 4)
    assert len(drafter._rows[fork.id].text.tokens) == LONGEST_MATCH
    drafter.end(parent)
    say(drafter, fork, [1, 2])
    assert guess(drafter, fork, 2) == [3, 4] and confidence_class(drafter, fork) == OWN


def test_what_the_next_turn_begins_with_is_its_own_text() -> None:
    drafter, turn = SuffixDrafter(), [*range(100, 160), 1, 2, 3, 4]
    ended(drafter, job_of(0, turn))
    again = job_of(1, [*turn, 9, 1, 2])
    assert guess(drafter, again, 2) == [3, 4] and confidence_class(drafter, again) == OWN
    other = job_of(2, [7, 9, 1, 2])
    assert guess(drafter, other, 2) == [3, 4] and confidence_class(drafter, other) >= EARLIER
    assert guess(drafter, job_of(3, [8, 3, 4]), 2) == [9, 1], "how the next turn went on is newer than its beginning"


def test_tokens_that_were_dropped_are_still_a_source() -> None:
    keep = KeepPolicy(first=2, last=4)
    drafter, job = SuffixDrafter(), job_of(0, [1, 2, 3, 4, 5, 6, 7, 8], keep=keep)
    drafter.propose([job], 4)
    for token in (10, 11, 12):
        job.append_token(token)
    assert job.drop_tokens() and 3 not in job.tokens
    assert guess(drafter, job) == []
    for token in (3, 4):
        job.append_token(token)
    assert guess(drafter, job, 3) == [5, 6, 7]
    for token in range(20, 40):  # nothing was asked meanwhile, and several cuts were made
        job.append_token(token)
        job.drop_tokens()
    drafter.propose([job], 4)
    assert list(drafter._rows[job.id].text.tokens) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 3, 4, *range(20, 40)]


def test_a_long_prompt_is_indexed_in_slices() -> None:
    drafter, length = SuffixDrafter(), 3 * INDEXED_AT_ONCE
    job = job_of(0, [*range(length), 10, 11])
    assert guess(drafter, job, 2) == [12, 13]
    drafter, job = SuffixDrafter(), job_of(0, [*range(length), length - 9, length - 8])
    assert [guess(drafter, job, 1) for _ in range(4)] == [[], [], [length - 7], [length - 7]]


def test_answers_that_were_never_drafted_for_are_remembered_in_slices() -> None:
    drafter, length = SuffixDrafter(), 3 * INDEXED_AT_ONCE
    drafter.end(job_of(0, range(length)))
    assert not drafter.texts.texts_by_client, "the engine may be one that cannot verify drafts"
    drafter.propose([job_of(1, [1])], 4)
    drafter.end(job_of(2, range(length)))
    job = job_of(3, [length - 9, length - 8])
    assert [guess(drafter, job, 1) for _ in range(4)] == [[], [], [length - 7], [length - 7]]


def test_an_end_and_forgetting_leave_nothing() -> None:
    drafter = SuffixDrafter()
    jobs = [job_of(0, [1, 2, 3], cache=False), job_of(1, [1, 2, 3])]
    for job in jobs:
        ended(drafter, job)
    assert not drafter._rows and list(drafter.texts.texts_by_client) == [None]
    drafter.forget()
    assert not drafter.texts.texts_by_client and guess(drafter, job_of(2, [4, 1, 2])) == []


def test_another_job_of_the_same_number_after_forgetting_is_another_text() -> None:
    drafter = SuffixDrafter()
    assert guess(drafter, job_of(0, [1, 2, 3, 1, 2])) == [3, 1, 2]
    drafter.forget()
    assert guess(drafter, job_of(0, [1, 2, 4, 1, 2])) == [4, 1, 2]


def alike(text: Sequence[int], row: Sequence[int], place: int) -> int:
    length = 0
    while length < min(place, len(row), LONGEST_MATCH) and text[place - 1 - length] == row[-1 - length]:
        length += 1
    return length


@given(st.lists(st.lists(st.integers(1, 6), min_size=2, max_size=30), min_size=1, max_size=6))
def test_a_search_finds_what_a_search_of_all_texts_finds(texts: list[list[int]]) -> None:
    """Each text begins with a token of its own. The last one searches the `WAYS` newest places after its last two."""
    texts = [[100 + number, *text] for number, text in enumerate(texts)]
    drafter = SuffixDrafter()
    for number, text in enumerate(texts[:-1]):
        ended(drafter, job_of(number, text))
    row = texts[-1]
    places = [
        (text, place) for text in texts for place in range(KEY_TOKENS, len(text)) if text[place - 2 : place] == row[-2:]
    ]
    newest = places[::-1][:WAYS]
    expected = max(newest, key=lambda found: alike(found[0], row, found[1]), default=None)
    job = job_of(len(texts), row)
    assert guess(drafter, job, 5) == ([] if expected is None else expected[0][expected[1] :][:5])


@settings(max_examples=examples(60))
@given(st.data())
def test_drafts_go_on_from_earlier_places_of_the_same_client(data: st.DataObject) -> None:
    """Whatever comes and goes: a draft follows the row's last two tokens somewhere in its own or its client's texts."""
    drafter = SuffixDrafter()
    tokens = st.integers(1, 5)
    said: dict[object, list[list[int]]] = {}
    running: list[tuple[object, Job]] = []
    for number in range(data.draw(st.integers(1, 20))):
        act = data.draw(st.sampled_from(["begin", "say", "say", "say", "end"]))
        if act == "begin" or not running:
            salt, cache = data.draw(st.sampled_from(["a", None])), data.draw(st.booleans())
            begin = data.draw(st.sampled_from(said.get(salt, [[]])))
            prompt = [*begin, *data.draw(st.lists(tokens, min_size=1, max_size=12))]
            keep = KeepPolicy(1, 8) if data.draw(st.booleans()) else None
            job = job_of(number, prompt, salt=salt, cache=cache, keep=keep)
            running.append((salt if cache else number, job))
        elif act == "say":
            for token in data.draw(st.lists(tokens, min_size=1, max_size=5)):
                _, job = data.draw(st.sampled_from(running))
                job.append_token(token)
                job.drop_tokens()
        else:
            whose, job = running.pop(data.draw(st.integers(0, len(running) - 1)))
            drafter.end(job)
            said.setdefault(whose, []).append(history(job))
        asked = [each for each in running if data.draw(st.booleans())]
        for (whose, job), draft in zip(asked, drafter.propose([job for _, job in asked], 4), strict=True):
            if draft is None:
                continue
            known = said.get(whose, []) + [history(other) for client, other in running if client == whose]
            mine = history(job)
            assert 1 <= len(draft.tokens) <= 4
            assert any(
                text[place - 2 : place] == mine[-2:] and text[place : place + len(draft.tokens)] == list(draft.tokens)
                for text in known
                for place in range(2, len(text))
            )
        for _, job in asked:
            text = drafter._rows[job.id].text
            assert list(text.tokens) == history(job)[text.start :]
    for _, job in running:
        drafter.end(job)
    assert not drafter._rows


def history(job: Job) -> list[int]:
    first = 0 if job.keep is None else job.keep.first
    return [*job.tokens[:first], *job.dropped_tokens, *job.tokens[first:]]
