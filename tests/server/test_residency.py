"""Which models are loaded, in use, waited for and unloaded, as plain data."""

from __future__ import annotations

from typing import Any

from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cortexmlx.server.residency import (
    FIRST_SECONDS,
    MAX_SECONDS,
    LoadBackoff,
    LoadModel,
    ModelState,
    ModelTicket,
    Residency,
    UnloadModel,
)

NAMES = "abcd"
names = strategies.sampled_from(NAMES)


class Requests(RuleBasedStateMachine):
    """Requests, loads and unloads in any order. What runs, waits and is loaded is counted here, too."""

    @initialize(
        sizes=strategies.lists(strategies.integers(1, 10), min_size=4, max_size=4),
        more=strategies.integers(0, 25),
        kept=strategies.sampled_from(["", "", "a", "ab"]),
        idle=strategies.sampled_from([None, 1.0, 10.0]),
    )
    def begin(self, sizes: list[int], more: int, kept: str, idle: float | None) -> None:
        self.sizes, self.kept, self.idle = dict(zip(NAMES, sizes, strict=True)), kept, idle
        held = sum(self.sizes[name] for name in kept)
        self.budget = held + max((self.sizes[name] for name in NAMES if name not in kept), default=0) + more
        self.residency = Residency(self.sizes, self.budget, kept, idle)
        self.now = 0.0
        self.running: dict[int, ModelTicket] = {}
        self.waiting: dict[int, ModelTicket] = {}
        self.loaded: set[str] = set()
        self.failed: set[str] = set()
        self.used: dict[str, float] = {}
        self.change: LoadModel | UnloadModel | None = None

    def granted(self, tickets: list[ModelTicket]) -> None:
        for ticket in tickets:
            assert ticket.model in self.loaded - self.failed
            self.running[ticket.number] = self.waiting.pop(ticket.number)

    @rule(name=names)
    def ask(self, name: str) -> None:
        at_once = self.residency.would_grant(name)
        ticket = self.residency.add_request(name)
        self.waiting[ticket.number] = ticket
        self.granted(self.residency.grant_requests())
        assert at_once == (ticket.number in self.running)

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=strategies.data())
    def leave(self, data: Any) -> None:
        number = data.draw(strategies.sampled_from(sorted([*self.running, *self.waiting])))
        self.end(self.running.get(number) or self.waiting.get(number))

    def end(self, ticket: Any) -> None:
        if self.running.pop(ticket.number, None):
            self.used[ticket.model] = self.now
        self.waiting.pop(ticket.number, None)
        self.residency.end_request(ticket, self.now)
        self.residency.end_request(ticket, self.now)
        self.granted(self.residency.grant_requests())

    @precondition(lambda self: self.loaded)
    @rule(data=strategies.data())
    def fail(self, data: Any) -> None:
        name = data.draw(strategies.sampled_from(sorted(self.loaded)))
        self.residency.mark_failed(name)
        self.failed.add(name)
        self.granted(self.residency.grant_requests())

    @rule(seconds=strategies.floats(0, 20))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def act(self) -> None:
        action = self.residency.begin_action(self.now)
        if self.change is not None:
            assert action is None
            return
        if isinstance(action, LoadModel):
            assert any(ticket.model == action.model for ticket in self.waiting.values())
            oldest = next(t for t in self.waiting.values() if t.model not in self.loaded)
            assert action.model == oldest.model
        if isinstance(action, UnloadModel):
            failed = action.model in self.failed
            assert action.model in self.loaded and (failed or action.model not in self.kept)
            assert all(ticket.model != action.model for ticket in self.running.values())
            self.loaded.discard(action.model)
            self.failed.discard(action.model)
            short = any(ticket.model not in self.loaded for ticket in self.waiting.values())
            assert failed or short or (self.idle is not None and self.now >= self.used[action.model] + self.idle)
        self.change = action

    @precondition(lambda self: self.change is not None)
    @rule(fails=strategies.booleans())
    def finish(self, fails: bool) -> None:
        change, self.change = self.change, None
        if isinstance(change, UnloadModel):
            self.residency.finish_unload()
        elif isinstance(change, LoadModel):
            mine = [ticket for ticket in self.waiting.values() if ticket.model == change.model]
            if fails:
                assert self.residency.fail_load() == mine
                for ticket in mine:
                    del self.waiting[ticket.number]
            else:
                self.loaded.add(change.model)
                self.used[change.model] = self.now
                tickets = self.residency.finish_load(self.now)
                assert tickets == mine
                self.granted(tickets)
        self.granted(self.residency.grant_requests())

    @precondition(lambda self: self.waiting)
    @rule(others=strategies.lists(names, min_size=1, max_size=4), long=strategies.integers(1, 3))
    def nobody_waits_for_ever(self, others: list[str], long: int) -> None:
        """While others ask in every round, and each request runs for some rounds, the oldest one is granted."""
        oldest = next(iter(self.waiting.values()))
        begun = dict.fromkeys(self.running, 0)
        for number in range((5 + long) * (len(self.waiting) + 2 * len(NAMES)) + 10):
            if oldest.number not in self.waiting:
                return
            self.act()
            if self.change is not None:
                self.finish(fails=False)
            for name in others:
                self.ask(name)
            for ticket in list(self.running.values()):
                if number - begun.setdefault(ticket.number, number) >= long + ticket.number % 2:
                    self.now += 0.01
                    self.end(ticket)
        raise AssertionError(f"{oldest} is not granted")

    @invariant()
    def it_counts_as_here(self) -> None:
        if not hasattr(self, "residency"):
            return
        assert set(self.residency._waiting_tickets.values()) == set(self.waiting.values())
        for name in NAMES:
            assert self.residency.user_count(name) == sum(t.model == name for t in self.running.values())
            assert (self.residency.state_of_model(name) is ModelState.LOADED) == (name in self.loaded)

    @invariant()
    def it_is_never_over_budget(self) -> None:
        if hasattr(self, "residency"):
            there = self.loaded | ({self.change.model} if self.change is not None else set())
            taken = {n for n in NAMES if self.residency.state_of_model(n) is not ModelState.UNLOADED}
            assert taken == there and sum(self.sizes[name] for name in taken) <= self.budget

    @invariant()
    def something_is_done_for_those_who_wait(self) -> None:
        if hasattr(self, "residency") and self.waiting and not self.running and self.change is None:
            self.act()
            assert self.change is not None

    @invariant()
    def only_who_needs_a_load_holds_up_others(self) -> None:
        if hasattr(self, "residency") and all(t.model in self.loaded - self.failed for t in self.waiting.values()):
            assert not self.waiting


TestRequests = Requests.TestCase
TestRequests.settings = settings(deadline=None, stateful_step_count=40)


def _take(residency: Residency, model: str, now: float = 0.0) -> ModelTicket:
    """Ask for a model that can be had without others' ends, and load it."""
    ticket = residency.add_request(model)
    if ticket in residency.grant_requests():
        return ticket
    while (action := residency.begin_action(now)) is not None:
        if isinstance(action, LoadModel):
            assert ticket in residency.finish_load(now)
            return ticket
        residency.finish_unload()
    raise AssertionError(f"{model} cannot be had")


def test_the_least_recently_used_model_makes_room() -> None:
    residency = Residency({"a": 4, "b": 4, "c": 4}, budget=8)
    first, second = _take(residency, "a"), _take(residency, "b")
    residency.end_request(first, 5.0)
    residency.end_request(second, 4.0)
    _take(residency, "c", 6.0)
    assert [residency.state_of_model(name) for name in "abc"] == [
        ModelState.LOADED,
        ModelState.UNLOADED,
        ModelState.LOADED,
    ]


def test_a_small_model_stays_where_a_large_one_makes_all_the_room() -> None:
    residency = Residency({"small": 1, "large": 9, "new": 9}, budget=10)
    residency.end_request(_take(residency, "small"), 1.0)
    residency.end_request(_take(residency, "large"), 2.0)
    _take(residency, "new", 3.0)
    assert (
        residency.state_of_model("small") is ModelState.LOADED
        and residency.state_of_model("large") is ModelState.UNLOADED
    )


def test_idle_models_are_unloaded_but_not_kept_ones() -> None:
    residency = Residency({"a": 1, "b": 1}, kept_models="b", idle=10.0)
    assert residency.next_idle_unload() is None
    first, second = _take(residency, "a"), _take(residency, "b")
    assert residency.next_idle_unload() is None
    residency.end_request(first, 5.0)
    residency.end_request(second, 5.0)
    assert residency.next_idle_unload() == 15.0 and residency.begin_action(14.9) is None
    assert residency.begin_action(15.0) == UnloadModel("a") and residency.state_of_model("a") is ModelState.UNLOADING
    residency.finish_unload()
    assert residency.begin_action(1e9) is None and residency.state_of_model("b") is ModelState.LOADED


# A model whose load failed is tried again later, and later still each time.


def test_each_failure_in_a_row_doubles_the_wait_up_to_a_bound() -> None:
    retries, cause, now = LoadBackoff(), OSError("damaged"), 100.0
    assert retries.current_failure("a", now) is None
    waits = []
    for _ in range(9):
        seconds = retries.record_failure("a", cause, now)
        assert retries.current_failure("a", now) == (cause, seconds) and retries.current_failure("b", now) is None
        assert retries.current_failure("a", now + seconds - 0.5) == (cause, 0.5)
        now += seconds
        assert retries.current_failure("a", now) is None
        waits.append(seconds)
    assert waits[:3] == [FIRST_SECONDS, 2 * FIRST_SECONDS, 4 * FIRST_SECONDS] and waits[-1] == MAX_SECONDS
    assert waits == sorted(waits)


def test_a_request_that_was_served_forgets_the_failures() -> None:
    retries = LoadBackoff()
    retries.record_failure("a", OSError(), 0.0)
    retries.record_failure("a", OSError(), 0.0)
    assert not retries.has_served("a")
    retries.record_success("a")
    assert retries.has_served("a")
    assert retries.current_failure("a", 0.0) is None
    assert retries.record_failure("a", OSError(), 0.0) == FIRST_SECONDS
    assert not retries.has_served("a")
    retries.record_success("a")
    retries.record_unload("a")
    assert not retries.has_served("a") and retries.current_failure("a", 0.0) is None
