"""The threads that tell events in thousands of orders that are drawn, and with what is thrown at them: whoever listens
hears each of its events once, in order and one at a time, the last one whatever happens, and no thread is left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from cortexmlx import Completion, CortexError, FinishReason, Progress, Timings, TokenEvent, Usage
from cortexmlx.core import callbacks
from cortexmlx.core import handle as handles
from cortexmlx.core.callbacks import CallbackThreads
from cortexmlx.core.handle import RequestHandle
from support.engine.interleaved import Interleaved

END = TokenEvent("", completion=Completion("t", (1,), FinishReason.LENGTH, Usage(1, 1), Timings(0, 0, 0, 0, 0)))
MOST = 3


class Asked:
    """A request: what its caller was told, and what the engine will say of it."""

    def __init__(self, world: World, number: int) -> None:
        dice = world.stage.dice
        self.world = world
        self.handle = RequestHandle(number, lambda request: None)
        self.to_say: list[TokenEvent | CortexError] = [
            TokenEvent("", progress=Progress("prefilling", i, 9)) for i in range(dice.randrange(4))
        ]
        self.to_say += [TokenEvent(str(i), i) for i in range(dice.randrange(5))]
        self.to_say.append(END if dice.random() < 0.7 else CortexError("it broke"))
        self.said: list[TokenEvent] = []
        self.heard: list[TokenEvent] = []
        self.kind = dice.choice(["quick", "quick", "slow", "stuck for long", "asks", "raises", "reads, too"])
        self.busy = False

    def say(self) -> None:
        said = self.to_say.pop(0)
        if isinstance(said, CortexError):
            self.handle.fail(said)
        else:
            self.said.append(said)
            self.handle.push(said)

    def __call__(self, event: TokenEvent) -> None:
        stage = self.world.stage
        assert not self.busy, "two threads tell one request"
        self.busy = True
        self.heard.append(event)
        try:
            if self.kind in ("slow", "stuck for long"):
                stage.pause(lambda: False, 0.3 if self.kind == "slow" else 30)
            elif self.kind == "asks" and self.world.left:
                self.world.ask()
            elif self.kind == "reads, too" and self.handle._events and not self.handle.ended:
                self.handle.wait()
            elif self.kind == "raises" and len(self.heard) == 2:
                raise ValueError
            stage.pause()
        finally:
            self.busy = False

    def has_heard_it_all(self) -> bool:
        """So far. It need not wait for the next event."""
        return self.handle.id in self.world.given_up or not (self.handle._events or self.busy)

    def check(self) -> None:
        assert not self.to_say, "the engine waits for ever until this one has heard everything so far"
        places = [self.said.index(event) if event.error is None else len(self.said) for event in self.heard]
        assert places == sorted(set(places)), "once, and in order"
        if self.handle.id in self.world.given_up:
            return
        last = self.heard[-1] if self.heard else None
        assert last is not None and (last is END or last.error is not None), f"not told of the end: {self.heard}"
        if self.kind != "reads, too":
            silent = [event for event in self.said if event not in self.heard]
            assert all(event.progress is not None for event in silent)


class World:
    """Requests that are asked by one thread and by those who listen, and answered by another."""

    def __init__(self, stage: Interleaved, count: int) -> None:
        self.stage, self.left = stage, count
        self.callers = CallbackThreads()
        self.open: list[Asked] = []
        self.all: list[Asked] = []
        self.given_up: set[int] = set()

    def ask(self) -> None:
        self.left -= 1
        asked = Asked(self, self.left)
        self.all.append(asked)
        self.open.append(asked)
        self.callers.subscribe(asked.handle, asked)

    def caller(self) -> None:
        while self.left:
            self.ask()
            self.stage.pause()

    def engine(self) -> None:
        while self.left or self.open:
            self.stage.pause(lambda: self.open or not self.left)
            if self.open:
                asked = self.stage.dice.choice(self.open)
                if self.stage.dice.random() < 0.3:
                    self.stage.pause(asked.has_heard_it_all)
                asked.say()
                if not asked.to_say:
                    self.open.remove(asked)

    def open_threads(self) -> list[Any]:
        return [t for t in self.stage.threads if t.name and not t.over]


def play(seed: int, monkeypatch: pytest.MonkeyPatch, more: Callable[[World], None] = lambda world: None) -> World:
    """A world from its beginning to its end, and what must be true then."""
    stage = Interleaved(seed)
    with monkeypatch.context() as patch:
        for module in (callbacks, handles):
            patch.setattr(module, "threading", stage.threading)
        patch.setattr(callbacks, "queue", stage.queue)
        patch.setattr(callbacks, "time", stage.time)
        patch.setattr(callbacks, "MAX_THREADS", MOST)
        patch.setattr(callbacks, "_all_callback_threads", weakref.WeakSet())
        world = World(stage, stage.dice.randrange(1, 7))
        patch.setattr(callbacks.log, "exception", lambda text, number: world.given_up.add(number))
        stage.spawn(world.caller)
        stage.spawn(world.engine)
        more(world)
        stage.run()
    for asked in world.all:
        asked.check()
    assert not world.open_threads(), "all end with the last request"
    callers = world.callers
    assert not (callers._open or callers._calls or callers._threads or callers._is_watching)
    assert all(item is None for item in callers._ready_queue._items), "nothing is kept"  # type: ignore[attr-defined]
    return world


def test_everybody_hears_everything_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(12):
        play(seed, monkeypatch)


def test_what_is_thrown_at_a_thread_harms_only_the_request_that_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def thrower(world: World) -> None:
        for _ in range(3):
            for _ in range(world.stage.dice.randrange(60)):
                world.stage.pause()
            telling = [t for t in world.open_threads() if t._target == world.callers._serve]
            world.stage.targets |= set(world.stage.dice.sample(telling, min(1, len(telling))))

    for seed in range(12):
        play(seed, monkeypatch, lambda world: world.stage.spawn(lambda: thrower(world)))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_everybody_hears_everything_in_very_many_orders(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(500 * (part + 1), 500 * (part + 2)):
        play(seed, monkeypatch)
