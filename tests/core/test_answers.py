"""Answers on their way out: what is told and kept, where their text ends, and how long they took."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cortexmlx.core import answers as answers_module
from cortexmlx.core.answers import AnswerGroup, OpenAnswer, answer_seed, job_params, logprob_of
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.text import StopConditions, TextStream
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import Segment
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import FinishReason, QueuedRequest, RequestState, TokenEvent, TokenLogprob
from cortexmlx.types.sampling_params import SamplingParams
from support.scheduling.requests import job_of


class Letters:
    """A detokenizer: each token is the character of its number."""

    def __init__(self) -> None:
        self._new = ""

    def add_token(self, token: int) -> None:
        self._new += chr(token)

    def finalize(self) -> None:
        """Nothing is held back."""

    @property
    def last_segment(self) -> str:
        new, self._new = self._new, ""
        return new


class Growing:
    """The answers of one request, grown by the test."""

    def __init__(self, count: int = 1, submitted: float = 0.0, **params: Any) -> None:
        asked = SamplingParams(**params)
        self.events: list[TokenEvent] = []
        self.handle = RequestHandle(1, lambda request: None, self.events.append)
        request = QueuedRequest((1, 2, 3), asked, submit_time=submitted)
        self.all = AnswerGroup(request, self.handle)
        self.jobs = [job_of(i, [1, 2, 3]) for i in range(count)]
        for job in self.jobs:
            job.request = replace(request, params=job_params(asked))
        texts = [TextStream(Letters(), StopConditions.from_params(asked)) for _ in self.jobs]
        self.answers = [OpenAnswer(self.all, job, i, texts[i]) for i, job in enumerate(self.jobs)]

    def say(self, text: str, index: int = 0, logprob: float | None = None, stop_token: bool = False) -> bool:
        """Return whether a stop string is complete."""
        stopped = False
        for character in text:
            job, token = self.jobs[index], ord(character)
            job.tokens.append(token)
            known = None if logprob is None else TokenLogprob(token, logprob, ())
            stopped = self.answers[index].add_token(token, answers_module.time.perf_counter(), known, stop_token)
        return stopped

    def told(self, index: int = 0) -> str:
        return "".join(e.text for e in self.events if e.index == index)


@pytest.mark.parametrize("stop", ["lo", "o w", "hello", "d"])
def test_the_text_ends_before_the_stop_string_and_all_that_was_told_is_the_text(stop: str) -> None:
    growing, whole = Growing(stop=(stop, "never")), "hello world"
    for character in whole:
        if growing.say(character):
            break
    growing.answers[0].finish(FinishReason.STOP)
    result = growing.handle.result(0)
    assert result.text == growing.told() == whole[: whole.index(stop)]
    assert [chr(t) for t in result.token_ids] == list(whole[: whole.index(stop) + len(stop)])
    assert result.usage.completion_tokens == len(result.token_ids)


def test_what_might_have_become_a_stop_string_comes_with_the_end() -> None:
    growing = Growing(stop=("lox",))
    growing.say("hello")
    assert growing.told() == "hel"
    growing.answers[0].finish(FinishReason.LENGTH)
    assert growing.told() == growing.handle.result(0).text == "hello"


def test_a_stop_token_is_a_token_but_no_text() -> None:
    growing = Growing()
    growing.say("ab")
    growing.say("!", stop_token=True)
    growing.answers[0].finish(FinishReason.STOP)
    result = growing.handle.result(0)
    assert (result.text, len(result.token_ids), growing.told()) == ("ab", 3, "ab")
    assert [e.token_id for e in growing.events] == [ord("a"), ord("b"), ord("!"), None]


def test_of_several_answers_the_last_event_has_all_in_their_order() -> None:
    growing = Growing(3, n=3)
    for index in (2, 0, 1):
        growing.say("abc"[: index + 1], index)
    for index in (1, 2, 0):
        assert not growing.handle.ended
        growing.answers[index].finish(FinishReason.LENGTH)
    result = growing.handle.result(0)
    assert [c.text for c in (result, *result.others)] == ["a", "ab", "abc"]
    assert [c.index for c in (result, *result.others)] == [0, 1, 2]
    assert [growing.told(i) for i in range(3)] == ["a", "ab", "abc"]
    ends = [e for e in growing.events if e.finish_reason is not None]
    assert [e.index for e in ends] == [1, 2, 0] and [e.completion is not None for e in ends] == [False, False, True]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_the_likeliest_are_kept_and_nothing_is_told_before(order: tuple[int, ...]) -> None:
    """Sums of log-probabilities: -2, none (cancelled before a token), -0.5, -3."""
    growing = Growing(4, n=2, best_of=4)
    growing.say("ab", 0, -1.0)
    growing.say("c", 2, -0.5)
    growing.say("def", 3, -1.0)
    for index in order:
        assert growing.events == []
        growing.answers[index].finish(FinishReason.CANCELLED if index == 1 else FinishReason.LENGTH)
    result = growing.handle.result(0)
    kept = [(c.text, c.index, c.cumulative_logprob) for c in (result, *result.others)]
    assert kept == [("c", 0, -0.5), ("ab", 1, -2.0)]
    assert result.logprobs is None, "they were taken to choose, not asked for"
    assert len(growing.events) == 1 and growing.events[0].completion is not None


def test_as_many_as_are_chosen_from_are_told_as_they_come() -> None:
    growing = Growing(2, n=2, best_of=2)
    growing.say("a", 1)
    assert growing.told(1) == "a"


def test_times_are_counted_from_the_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=lambda: clock.now, now=100.0)
    monkeypatch.setattr(answers_module, "time", clock)
    growing = Growing(submitted=97.0)
    growing.jobs[0].cached = 1
    growing.answers[0].begin_step(Segment(JobId(0), 0, 1, 2), 100.0)
    assert growing.handle.state is RequestState.PREFILLING
    for now in (104.0, 105.0, 106.0, 108.0):
        clock.now = now
        growing.say("x")
        assert growing.handle.state is RequestState.DECODING
    growing.answers[0].begin_step(Segment(JobId(0), 1, 0, 7), 107.0)  # it was preempted, and begins again
    clock.now = 110.0
    growing.answers[0].finish(FinishReason.LENGTH)
    times = growing.handle.result(0).timings
    assert (times.queued, times.ttft, times.total) == (3.0, 7.0, 13.0)
    assert times.prefill_tokens_per_second == 2 / 4.0, "of three tokens one was cached"
    assert times.decode_tokens_per_second == 3 / 4.0, "three more tokens in four seconds"


def test_an_answer_without_a_token_has_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "time", SimpleNamespace(perf_counter=lambda: 9.0))
    growing = Growing(submitted=4.0)
    growing.answers[0].finish(FinishReason.CANCELLED)
    result = growing.handle.result(0)
    assert growing.handle.state is RequestState.CANCELLED and result.token_ids == ()
    assert (result.timings.total, result.timings.decode_tokens_per_second) == (5.0, 0.0)
    assert result.timings.prefill_tokens_per_second == 0.0 and result.cumulative_logprob is None


def test_log_probabilities_are_those_at_the_tokens_place_in_the_result() -> None:
    result: Any = SimpleNamespace(logprobs=[-9.0, -1.0], top_ids=[[], [5, 6, 7]], top_logprobs=[[], [-1.0, -2.0, -3.0]])
    assert logprob_of(5, 1, 2, result) == TokenLogprob(5, -1.0, ((5, -1.0), (6, -2.0)))
    assert logprob_of(5, 1, 0, result) == TokenLogprob(5, -1.0, ())
    result.logprobs = None
    assert logprob_of(5, 1, 2, result) is None


def test_choosing_the_best_takes_log_probabilities_and_changes_nothing_else() -> None:
    best = SamplingParams(best_of=3, temperature=0.5)
    assert job_params(best) == replace(best, logprobs=0)
    for params in (SamplingParams(n=2), SamplingParams(best_of=3, logprobs=4)):
        assert job_params(params) is params


def test_each_answer_has_a_seed_of_its_own_and_the_first_that_of_the_request() -> None:
    for seed in (0, 7, 2**63 - 1):
        seeds = [answer_seed(seed, index) for index in range(2000)]
        assert seeds[0] == seed and len(set(seeds)) == 2000 and all(0 <= s < 2**63 for s in seeds)
    assert not {answer_seed(1, i) for i in range(100)} & {answer_seed(2, i) for i in range(100)}


def test_progress_is_told_a_few_times_in_a_second_at_most() -> None:
    growing = Growing()
    growing.jobs[0].tokens = [1] * 100
    for place, now in enumerate((7.0, 7.02, 7.09, 7.11, 7.2, 7.5)):
        growing.answers[0].begin_step(Segment(JobId(0), 0, 10 * place, 10), now)
        assert growing.handle.progress == Progress("prefilling", 10 * place, 100)
    assert [event.progress and event.progress.done for event in growing.events] == [0, 30, 50]
