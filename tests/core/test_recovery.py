"""What happens to requests when a worker is lost, at every call of a runner, with a model in this process."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cortexmlx import Engine, FinishReason
from cortexmlx.errors import EngineClosed, HostLost, HostRefused, InvalidRequest, RequestTimeout
from cortexmlx.execution.boundary import Refusal
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.structured.output import StructuredOutput
from support.engine.core_driver import Driver, assert_nothing_lost
from support.hosts.local_group import LocalGroup
from support.models.tiny import tokens_of
from support.patience import PATIENCE, soon

PROMPTS = [tokens_of(9, seed=1), tokens_of(21, seed=2), tokens_of(40, seed=3)]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[LocalGroup]:
    """The groups that were made, which are in this process."""
    made: list[LocalGroup] = []

    def make(*args: Any) -> LocalGroup:
        made.append(LocalGroup(*args))
        return made[-1]

    monkeypatch.setattr("cortexmlx.distributed.hosted_model.HostGroup", make)
    return made


def at(call: str, count: int) -> Any:
    """A fault at the `count`th such call, once."""
    left = [count]

    def fault(name: str) -> bool:
        left[0] -= name == call
        return name == call and left[0] == 0

    return fault


def ask(driver: Driver, groups: list[LocalGroup], call: str, count: int) -> list[Any]:
    handles = [driver.add(prompt, 30) for prompt in PROMPTS]
    groups[0].fault = at(call, count)
    driver.finish()
    return handles


def test_a_hosted_model_answers_as_one_in_this_process(tiny: Any, theirs: Any, groups: list[LocalGroup]) -> None:
    driver = Driver(tiny("llama"), hosts=1)
    answers = driver.answers(PROMPTS, 30)
    assert [list(tokens) for tokens in answers] == [theirs("llama", prompt, 30) for prompt in PROMPTS]
    assert "a note of the worker" in driver.core.info.notes and driver.core.info.notes[-1] == "1 workers: worker 1"
    stats = driver.core.stats()
    assert stats.hosts[0].weight_bytes == driver.core.info.weight_bytes > 0
    assert driver.core.loaded.model is None and stats.host_losses == 0
    driver.core.release()
    assert groups[0].closed


@pytest.mark.parametrize(("call", "count"), [("can_resize", 1), ("dispatch", 2), ("collect", 5), ("settle", 1)])
def test_running_requests_begin_again_with_their_tokens(
    tiny: Any, theirs: Any, groups: list[LocalGroup], call: str, count: int
) -> None:
    driver = Driver(tiny("llama"), hosts=1, resume_lost=True)
    handles = ask(driver, groups, call, count)
    answers = [list(driver.result(handle).token_ids) for handle in handles]
    assert answers == [theirs("llama", prompt, 30) for prompt in PROMPTS]
    met = groups[0].epoch - 1
    assert met == driver.core.stats().host_losses <= 1 and (met or call in ("can_resize", "settle"))
    driver.core.check_invariants()
    driver.core.relieve(True)
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize(("call", "count"), [("dispatch", 5), ("collect", 1)])
def test_running_requests_fail_with_the_host_and_waiting_ones_are_answered(
    tiny: Any, theirs: Any, groups: list[LocalGroup], call: str, count: int
) -> None:
    driver = Driver(tiny("llama"), hosts=1, max_rows=2)
    handles = ask(driver, groups, call, count)
    for handle in handles[:2]:
        with pytest.raises(HostLost, match="worker 1 ended") as lost:
            driver.result(handle)
        assert lost.value.host == "worker 1"
    assert list(driver.result(handles[2]).token_ids) == theirs("llama", PROMPTS[2], 30)
    assert groups[0].epoch == 2


@pytest.mark.parametrize("call", ["forward", "choose"])
def test_structured_answers_begin_again_in_their_form(tiny: Any, groups: list[LocalGroup], call: str) -> None:
    driver = Driver(tiny("llama"), hosts=1, resume_lost=True)
    form = {"structured": StructuredOutput.regex("[0-9]{12}"), "ignore_eos": False}
    expected = driver.result_of(PROMPTS[0], 30, **form).text
    groups[0].fault = at(call, 4)
    assert driver.result_of(PROMPTS[0], 30, **form).text == expected
    assert groups[0].epoch == 2
    assert expected.isdigit() and len(expected) == 12


def test_a_group_that_is_lost_while_idle_is_started_again_before_the_next_request(
    tiny: Any, theirs: Any, groups: list[LocalGroup]
) -> None:
    driver = Driver(tiny("llama"), hosts=1)
    groups[0].lose("worker 1 was killed", notice=True)
    for _ in range(2):  # the loss, and the end of the start
        driver.calls.get(timeout=PATIENCE)(driver.core)
    assert groups[0].epoch == 2
    assert [list(tokens) for tokens in driver.answers(PROMPTS[:1], 30)] == [theirs("llama", PROMPTS[0], 30)]


@pytest.mark.parametrize("resume", [False, True])
def test_a_request_that_is_sent_before_a_loss_is_noticed_fails_or_begins_again(
    tiny: Any, theirs: Any, groups: list[LocalGroup], resume: bool
) -> None:
    driver = Driver(tiny("llama"), hosts=1, resume_lost=resume)
    expected = theirs("llama", PROMPTS[1], 30)
    assert [list(tokens) for tokens in driver.answers(PROMPTS[1:2], 30)] == [expected]
    groups[0].lose("worker 1 was stopped")
    handle = driver.add(PROMPTS[1], 30)
    driver.finish()
    if resume:
        assert list(driver.result(handle).token_ids) == expected
    else:
        with pytest.raises(HostLost, match="worker 1 was stopped"):
            driver.result(handle)
    assert groups[0].epoch == 2 and driver.core.stats().host_losses == 1
    assert [list(tokens) for tokens in driver.answers(PROMPTS[1:2], 30)] == [expected]


def test_everything_is_heard_while_workers_are_started_anew(tiny: Any, theirs: Any, groups: list[LocalGroup]) -> None:
    with Engine(str(tiny("llama")), hosts=1) as engine:
        engine.generate(PROMPTS[0], max_tokens=3, ignore_eos=True)
        engine.pin(PROMPTS[2])
        groups[0].may_start.clear()
        groups[0].lose("worker 1 was killed", notice=True)
        assert soon(lambda: groups[0].starts == 2)
        waiting = [engine.submit(prompt, max_tokens=30, ignore_eos=True) for prompt in PROMPTS]
        with pytest.raises(RequestTimeout):
            engine.generate(PROMPTS[0], max_tokens=3, timeout=0.01)
        cancelled = engine.submit(PROMPTS[0], max_tokens=3)
        cancelled.cancel()
        assert cancelled.result(PATIENCE).finish_reason is FinishReason.CANCELLED
        for level in ("warning", "critical"):
            engine.on_memory_pressure(level)
        engine.inspect(lambda core: core.compact())
        engine.check_invariants()
        stats = engine.stats()
        assert (stats.host_losses, stats.rows_running, stats.rows_waiting) == (1, 0, 3)
        assert engine.blocks().total == stats.total_blocks
        assert groups[0].epoch == 1, "they are not there yet"
        groups[0].may_start.set()
        answers = [list(handle.result(PATIENCE).token_ids) for handle in waiting]
        assert answers == [theirs("llama", prompt, 30) for prompt in PROMPTS]
        assert engine.stats().host_losses == 1 and groups[0].epoch == 2
        engine.check_invariants()


def test_an_engine_is_closed_while_workers_are_started_anew(tiny: Any, groups: list[LocalGroup]) -> None:
    with Engine(str(tiny("llama")), hosts=1) as engine:
        groups[0].may_start.clear()
        groups[0].lose("worker 1 was killed", notice=True)
        assert soon(lambda: groups[0].starts == 2)
        handle = engine.submit(PROMPTS[0], max_tokens=3)
    assert groups[0].closed and groups[0].epoch == 1
    with pytest.raises(EngineClosed):
        handle.result(PATIENCE)


def test_workers_that_are_lost_as_soon_as_they_are_started(tiny: Any, theirs: Any, groups: list[LocalGroup]) -> None:
    """Their loss, and a second notice of the first one, begin no other start. The next request does."""
    driver = Driver(tiny("llama"), hosts=1)
    for _ in range(2):
        groups[0].lose("worker 1 was killed", notice=True)
    for _ in range(2):
        driver.calls.get(timeout=PATIENCE)(driver.core)
    waiting = driver.add(PROMPTS[0], 30)
    assert soon(lambda: groups[0].epoch == 2 and not driver.calls.empty())
    groups[0].lose("worker 1 was killed again", notice=True)
    driver.finish()
    with pytest.raises(HostLost, match="killed again"):
        driver.result(waiting)
    assert groups[0].epoch == 2 and driver.core.stats().host_losses == 1
    assert [list(tokens) for tokens in driver.answers(PROMPTS[:1], 30)] == [theirs("llama", PROMPTS[0], 30)]
    assert groups[0].epoch == 3


def test_statistics_are_told_when_workers_cannot_be_started(tiny: Any, groups: list[LocalGroup]) -> None:
    with Engine(str(tiny("llama")), hosts=1) as engine:
        groups[0].refusals.append(HostRefused("other weights"))
        groups[0].lose("worker 1 was killed", notice=True)
        assert soon(lambda: groups[0].starts == 2)
        assert engine.stats().host_losses == 1
        groups[0].refusals.append(HostLost("no network"))
        with pytest.raises(HostLost, match="no network"):
            engine.generate(PROMPTS[0], max_tokens=3)
        assert engine.stats().host_losses == 1
        assert len(engine.generate(PROMPTS[0], max_tokens=3, ignore_eos=True).token_ids) == 3


def test_a_loss_that_a_step_has_met_already_is_not_noticed_again(tiny: Any, groups: list[LocalGroup]) -> None:
    driver = Driver(tiny("llama"), hosts=1, resume_lost=True)
    handle = driver.add(PROMPTS[0], 30)
    driver.step(3)
    groups[0].lose("worker 1 was killed", notice=True)
    driver.finish()
    assert len(driver.result(handle).token_ids) == 30 and groups[0].epoch == 2


def test_a_request_that_ends_its_worker_each_time_fails_in_the_end(
    tiny: Any, theirs: Any, groups: list[LocalGroup]
) -> None:
    driver = Driver(tiny("llama"), hosts=1, resume_lost=True)
    groups[0].fault = lambda name: name == "collect" and groups[0].epoch < 9
    handle = driver.add(PROMPTS[0], 30)
    driver.finish()
    with pytest.raises(HostLost):
        driver.result(handle)
    assert groups[0].epoch == 5
    groups[0].fault = None
    assert [list(tokens) for tokens in driver.answers(PROMPTS[:1], 30)] == [theirs("llama", PROMPTS[0], 30)]


def test_when_the_workers_cannot_be_started_all_requests_fail_and_the_next_one_tries_again(
    tiny: Any, theirs: Any, groups: list[LocalGroup]
) -> None:
    driver = Driver(tiny("llama"), hosts=1, resume_lost=True, max_rows=1)
    handles = [driver.add(prompt, 30) for prompt in PROMPTS]
    groups[0].fault, groups[0].refusals = (
        at("dispatch", 3),
        groups[0].refusals.__class__([HostRefused("other weights")]),
    )
    driver.finish()
    for handle in handles:
        with pytest.raises(HostRefused, match="other weights"):
            driver.result(handle)
    assert [list(tokens) for tokens in driver.answers(PROMPTS[:1], 30)] == [theirs("llama", PROMPTS[0], 30)]
    assert groups[0].epoch == 2


def test_memory_that_new_workers_are_refused_costs_no_request(
    tiny: Any, theirs: Any, groups: list[LocalGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers are there, and the first step asks for the arena again."""
    driver = Driver(tiny("llama"), hosts=1, resume_lost=True)
    begin, refusals = ModelRunner.begin, [Refusal("[malloc] Unable to allocate", is_resize=False)]
    monkeypatch.setattr(ModelRunner, "begin", lambda me, blocks: refusals.pop() if refusals else begin(me, blocks))
    handles = ask(driver, groups, "dispatch", 3)
    assert [list(driver.result(handle).token_ids) for handle in handles] == [theirs("llama", p, 30) for p in PROMPTS]
    assert groups[0].epoch == 2 and not refusals


@pytest.mark.parametrize("idle", [False, True])
def test_a_start_that_fails_outside_of_the_workers_ends_and_the_next_request_tries_again(
    idle: bool, tiny: Any, theirs: Any, groups: list[LocalGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system has no thread for it, or no memory; a loss is met by a step, or noticed while idle."""
    start, failures = threading.Thread.start, [RuntimeError("can't start new thread"), MemoryError()]

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "cortexmlx starts workers" and failures:
            raise failures.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    driver = Driver(tiny("llama"), hosts=1, resume_lost=True)
    groups[0].lose("worker 1 was killed", notice=idle)
    while not driver.calls.empty():
        driver.calls.get()(driver.core)
    while failures:
        handle = driver.add(PROMPTS[0], 30)
        driver.finish()
        with pytest.raises(HostLost, match="cannot be started"):
            driver.result(handle)
    assert [list(tokens) for tokens in driver.answers(PROMPTS[:1], 30)] == [theirs("llama", PROMPTS[0], 30)]


def test_answers_of_one_request_fail_together(tiny: Any, groups: list[LocalGroup]) -> None:
    driver = Driver(tiny("llama"), hosts=1)
    handle = driver.add(PROMPTS[1], 30, n=3, temperature=1.0)
    groups[0].fault = at("dispatch", 4)
    driver.finish()
    with pytest.raises(HostLost):
        driver.result(handle)
    assert not driver.core.requests.by_id and not driver.core.scheduler.jobs


def test_after_an_interrupt_the_workers_are_started_anew(tiny: Any, theirs: Any, groups: list[LocalGroup]) -> None:
    driver = Driver(tiny("llama"), hosts=1)
    driver.add(PROMPTS[0], 30)
    driver.step(3)
    driver.core.reset()
    assert groups[0].epoch == 2
    assert [list(tokens) for tokens in driver.answers(PROMPTS[:1], 30)] == [theirs("llama", PROMPTS[0], 30)]


def test_an_engine_with_hosts_refuses_the_callers_own_functions_by_name(tiny: Any, groups: list[LocalGroup]) -> None:
    with Engine(str(tiny("llama")), hosts=1) as engine:
        with pytest.raises(InvalidRequest, match="logits_processors are functions of this process") as refused:
            engine.generate(PROMPTS[0], logits_processors=[lambda tokens, logits: logits])
        assert refused.value.field == "logits_processors"
        assert len(engine.generate(PROMPTS[0], max_tokens=3, ignore_eos=True).token_ids) == 3
        assert engine.perplexity(list(PROMPTS[2])).tokens == len(PROMPTS[2]) - 1
    assert groups[0].closed
