"""The rows of a draft model follow their texts: what they guess is what mlx-lm's own loop answers to each text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.core.draft_model import DraftModel
from cortexmlx.scheduling.job import Job
from support.drafting.draft_models import draft_model, guesses
from support.engine.judge import assert_same
from support.models.tiny import VOCAB, tokens_of, write_tiny
from support.scheduling.requests import job_of


class Story:
    """Texts that grow as those of an engine do, by guesses that were right and by tokens that nobody guessed."""

    def __init__(self, name: str, model: DraftModel, judged: Any, theirs: Any, seed: int) -> None:
        self.name, self.model, self.judged, self.theirs = name, model, judged, theirs
        self.random = random.Random(seed)
        self.jobs: list[Job] = []
        self.begun = self.guessed = 0

    def begin(self) -> None:
        """A new text. Half of them begin as others do."""
        length = self.random.choice((3, 9, 16, 24, 40))
        shared = tokens_of(24, seed=1) if self.random.random() < 0.5 else []
        self.begun += 1
        self.jobs.append(job_of(self.begun, [*shared, *tokens_of(length, seed=self.begun)], max_tokens=400))

    def round(self) -> None:
        """Some of the texts get guesses, and then grow."""
        asked = [job for job in self.jobs if self.random.random() < 0.8]
        count = self.random.choice((1, 2, 4))
        for job, guessed in zip(asked, guesses(self.model, asked, count), strict=True):
            if guessed is None:
                continue
            assert 1 <= len(guessed) <= 4
            self.guessed += len(guessed)
            assert_same(self.judged, job.tokens, guessed, self.theirs(self.name, job.tokens, len(guessed)))
            right = self.random.randint(0, len(guessed))
            job.tokens += guessed[:right]
            if self.random.random() < 0.8:
                job.tokens.append(self.random.randrange(256))
        for job in self.jobs:
            if job not in asked and self.random.random() < 0.5:
                job.tokens += [self.random.randrange(256) for _ in range(self.random.choice((1, 3, 9)))]

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            if len(self.jobs) < 6 and self.random.random() < 0.4:
                self.begin()
            if self.jobs and self.random.random() < 0.1:
                ended = self.jobs.pop(self.random.randrange(len(self.jobs)))
                self.model.end(ended)
                self.model.rows.check_invariants()
            if self.random.random() < 0.1:
                self.model.tidy()
                self.model.rows.check_invariants()
            if self.random.random() < 0.04:
                self.model.relieve(self.random.random() < 0.5)
            self.round()


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("windowed llama", 14), pytest.param("deepseek_v3", 64, marks=pytest.mark.slow)],
)
def test_it_guesses_what_the_model_alone_would_answer(
    name: str, blocks: int, tiny: Any, judged: Any, theirs: Any
) -> None:
    """In a large arena, and in one that holds some of the rows only."""
    model = draft_model(tiny(name), blocks)
    story = Story(name, model, judged(name)[0], theirs, seed=blocks)
    story.run(15)
    assert story.guessed > 30
    for job in story.jobs:
        model.end(job)
    model.rows.check_invariants()
    assert model.rows.num_rows == 0
    model.release()


@pytest.fixture
def model(tiny: Any) -> Any:
    made = draft_model(tiny("llama"))
    yield made
    made.release()


def steps(model: DraftModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step of the model computes from now on."""
    counted: list[int] = []
    dispatch = model.runner.dispatch

    def counting(plan: Any) -> Any:
        counted.append(len(plan.positions))
        return dispatch(plan)

    monkeypatch.setattr(model.runner, "dispatch", counting)
    return counted


def test_a_round_computes_only_what_is_new(model: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(1, tokens_of(30))
    (first,) = guesses(model, [job])
    assert first is not None
    counted = steps(model, monkeypatch)
    job.tokens += [*first, 7]
    guesses(model, [job])
    assert counted == [2, 1, 1, 1], "the last guess, which no step has read, and the token after it"
    del counted[:]
    job.tokens.append(8)
    guesses(model, [job])
    assert counted == [1, 1, 1, 1]


def test_guesses_that_still_fit_cost_nothing(model: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(1, tokens_of(30))
    (first,) = guesses(model, [job])
    counted = steps(model, monkeypatch)
    assert first is not None and guesses(model, [job]) == [first]
    job.tokens += first[:2]
    assert guesses(model, [job]) == [first[2:]] and not counted


def test_texts_with_one_beginning_compute_it_once(model: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = steps(model, monkeypatch)
    shared = tokens_of(24)
    jobs = [job_of(number, [*shared, number, number]) for number in range(3)]
    first = guesses(model, jobs)
    assert first[0] is not None and first[1:] == [None, None], "they wait for the blocks of the first"
    del counted[:]
    jobs[0].tokens.append(1)
    assert None not in guesses(model, jobs)
    assert counted[0] == 1 + 2 + 2


def test_clients_share_nothing(model: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = steps(model, monkeypatch)
    text = tokens_of(24)
    for number, client in enumerate(("a", "b", "a")):
        job = job_of(number, text, client=client)
        job.salt = client
        assert guesses(model, [job], 1) != [None]
        model.end(job)
    assert counted == [24, 24, 1]


def test_long_texts_come_in_pieces_and_short_ones_need_not_wait(model: DraftModel) -> None:
    short, long = job_of(1, tokens_of(10)), job_of(2, tokens_of(70, seed=2))
    seen = []
    for _ in range(3):
        seen.append([guess is not None for guess in guesses(model, [long, short])])
        short.tokens.append(5)
    assert seen == [[False, True], [False, True], [True, True]]


def test_a_text_that_has_dropped_tokens_begins_again(model: DraftModel, judged: Any, theirs: Any) -> None:
    job = job_of(1, tokens_of(40))
    guesses(model, [job])
    del job.tokens[4:20]
    job.drops += 1
    (guessed,) = guesses(model, [job])
    assert guessed is not None
    assert_same(judged("llama")[0], job.tokens, guessed, theirs("llama", job.tokens, 4))


def test_what_the_draft_model_does_not_know_is_not_followed(tmp_path: Path) -> None:
    """Its embeddings are narrower: tokens beyond them are those of the other model alone."""
    model = draft_model(write_tiny(tmp_path / "narrow", vocab_size=VOCAB - 8))
    known, strange = job_of(1, tokens_of(10)), job_of(2, [*tokens_of(10), VOCAB - 1])
    assert [guess is None for guess in guesses(model, [known, strange])] == [False, True]
    known.tokens.append(VOCAB - 8)
    assert guesses(model, [known]) == [None] and model.rows.num_rows == 0
    model.release()


def test_texts_end_at_the_context_of_the_draft_model(tmp_path: Path) -> None:
    model = draft_model(write_tiny(tmp_path / "short", max_position_embeddings=32))
    job = job_of(1, tokens_of(28))
    assert guesses(model, [job]) != [None]
    job.tokens.append(3)
    assert guesses(model, [job]) == [None] and model.rows.num_rows == 0
    model.release()


def test_an_answer_that_is_nearly_at_its_end_gets_no_more_guesses_than_it_can_use(model: DraftModel) -> None:
    job = job_of(1, tokens_of(10), max_tokens=3)
    (guessed,) = guesses(model, [job])
    assert guessed is not None and len(guessed) == 2
    assert guesses(model, [job_of(2, tokens_of(10), max_tokens=1)]) == [None]
