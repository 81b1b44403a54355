"""A worker's loop: one answer to each call, and no further call after a failure."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cortexmlx.distributed.messages import (
    ANSWER,
    CALL,
    AnyCall,
    Begin,
    CallAnswer,
    Close,
    MakeRunner,
    NumberedCall,
    Open,
    RankInfo,
    RankOptions,
    ShardingMode,
    Trim,
)
from cortexmlx.distributed.rank_server import serve
from cortexmlx.errors import HostLost, HostRefused
from cortexmlx.execution.boundary import MemoryInUse
from cortexmlx.kv.spec import LayerGroup
from support.hosts.channels import QueueChannel, channel_pair

OPTIONS = RankOptions("m", None, False, None, None, 8, "auto", False, 4, 32, ShardingMode.PIPELINE)
INFO = RankInfo((), 320, 512, 1 << 20, 9, "float16", "m", "llama", ("a note",), "id", 1 << 30, "reference", 2 << 20, 18)


class StubRunner:
    """Has no memory. `calls` has the names of what it was called for."""

    computes_at_dispatch, shapes, blocks = True, (), (3,)
    bytes = MemoryInUse(1, 2, 3, 4, 5)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> None:
            self.calls.append(name)
            if name == "begin" and args == ((0,),):
                raise ZeroDivisionError("odd")

        return call


class StubRank:
    """A rank without a model."""

    info = INFO

    def __init__(self, runner: StubRunner) -> None:
        self._runner = runner

    def make_runner(self, groups: Sequence[LayerGroup]) -> Any:
        """As `OpenedRank.make_runner`."""
        return self._runner


class Worker:
    """`serve` on a thread, with a stub."""

    def __init__(self) -> None:
        self.runner = StubRunner()
        self.opened: list[RankOptions] = []
        self.ours, theirs = channel_pair("worker")
        self.raised: list[Exception] = []
        self._thread = threading.Thread(target=self._run, args=(theirs,), daemon=True)
        self._thread.start()
        self._number = 0

    def _run(self, channel: QueueChannel) -> None:
        try:
            serve(channel, self._open)
        except HostLost as error:
            self.raised.append(error)

    def _open(self, options: RankOptions) -> StubRank:
        self.opened.append(options)
        if options.model == "refused":
            raise HostRefused("3 heads do not divide by 2 ranks")
        return StubRank(self.runner)

    def ask(self, asks: AnyCall) -> CallAnswer:
        """Call and wait for the answer."""
        self._number += 1
        self.ours.send(CALL.encode(NumberedCall(self._number, asks)))
        answer = ANSWER.decode(self.ours.receive())
        assert answer.number == self._number
        return answer

    def join(self) -> None:
        """Wait for the end of `serve`."""
        self._thread.join()


def test_the_story_of_a_worker() -> None:
    worker = Worker()
    assert worker.ask(Open(OPTIONS)) == CallAnswer(1, info=INFO) and worker.opened == [OPTIONS]
    arranged = worker.ask(MakeRunner(()))
    assert arranged.state is not None and (arranged.state.bytes, arranged.state.blocks) == (StubRunner.bytes, (3,))
    assert worker.ask(Begin((3,))).value is None and worker.ask(Trim()).value is None
    assert worker.ask(Close()) == CallAnswer(5)
    worker.join()
    assert worker.runner.calls == ["begin", "trim", "close"] and not worker.raised


def test_nothing_is_carried_out_after_a_failure() -> None:
    worker = Worker()
    worker.ask(Open(OPTIONS))
    worker.ask(MakeRunner(()))
    for asks in (Begin((0,)), Begin((1,)), Trim()):
        assert str(worker.ask(asks).error) == "ZeroDivisionError: odd"
    assert worker.runner.calls == ["begin"]
    worker.ask(Close())
    worker.join()
    assert worker.runner.calls == ["begin", "close"]


def test_a_refused_model_keeps_its_error() -> None:
    worker = Worker()
    assert isinstance(worker.ask(Open(replace(OPTIONS, model="refused"))).error, HostRefused)
    worker.ours.close()
    worker.join()


def test_a_lost_controller_ends_the_worker_and_frees_its_memory() -> None:
    worker = Worker()
    worker.ask(Open(OPTIONS))
    worker.ask(MakeRunner(()))
    worker.ours.close()
    worker.join()
    assert worker.runner.calls == ["close"] and worker.raised


def test_bytes_that_are_no_call_are_answered_and_end_the_worker() -> None:
    worker = Worker()
    worker.ours.send(b"\xff\xff\xff")
    answer = ANSWER.decode(worker.ours.receive())
    assert isinstance(answer.error, HostLost)
    worker.join()
    assert "cannot be read" in str(worker.raised[0])


@pytest.mark.parametrize("asks", [MakeRunner(()), Begin((1,)), Trim()])
def test_a_call_before_its_turn_is_a_failure(asks: AnyCall) -> None:
    worker = Worker()
    assert worker.ask(asks).error is not None
    worker.ask(Close())
    worker.join()
    assert not worker.runner.calls
