"""The workers of an engine: what they are asked to open, when they are started again, and who is refused."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.core.config import EngineConfig
from cortexmlx.distributed import group
from cortexmlx.distributed.group import ATTEMPTS, HostGroup
from cortexmlx.distributed.messages import RankInfo, RankOptions, RankState
from cortexmlx.distributed.overdue import HangLimits
from cortexmlx.errors import CortexError, EngineClosed, HostLost, HostRefused, InvalidRequest
from cortexmlx.execution.boundary import MemoryInUse
from cortexmlx.models.load import load_without_weights
from cortexmlx.stats import HostStats
from support.patience import PATIENCE

INFO = RankInfo((), 320, 512, 10, 5, "float32", "tiny", "llama", (), "identity", 1 << 30, "metal", 17, 8)


class Workers:
    """In the place of a WorkerGroup and its RemoteRunner: `refusals` are raised by the next starts."""

    def __init__(self, hosts: Any, check: Callable[[], None]) -> None:
        self.check = check
        self.hosts, self.names, self.channels = hosts, ("one", "two"), ()
        self.epoch = self.closed = 0
        self.refusals: deque[CortexError] = deque()
        self.infos = [INFO, INFO]
        self.asked: list[RankOptions] = []
        self.loading: threading.Event | None = None
        self.limits: HangLimits | None = None
        self.ranks: tuple[RankState, ...] = ()
        self.action: Callable[[HostLost], None] | None = None

    def with_limits(self, limits: HangLimits) -> Workers:
        self.limits = limits
        return self

    def reopen(self) -> None:
        self.epoch += 1
        if self.refusals:
            raise self.refusals.popleft()

    def when_lost(self, action: Callable[[HostLost], None]) -> None:
        self.action = action

    def close(self) -> None:
        self.closed += 1
        if self.loading is not None:
            self.loading.set()

    def open(self, options: RankOptions) -> tuple[RankInfo, ...]:
        self.asked.append(options)
        if self.loading is not None and not self.loading.wait(PATIENCE):
            raise AssertionError("the workers load for ever")
        if self.loading is not None and self.closed:
            raise HostLost("the channels were closed")
        return tuple(self.infos)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Workers]]:
    """The workers that were made."""
    made: list[Workers] = []

    def make(hosts: Any, check: Callable[[], None]) -> Workers:
        made.append(Workers(hosts, check))
        return made[-1]

    monkeypatch.setattr(group, "WorkerGroup", make)
    monkeypatch.setattr(group, "RemoteRunner", lambda channels, names, limits: made[-1].with_limits(limits))
    monkeypatch.setattr(group, "PAUSE_SECONDS", 0.0)
    yield made


@pytest.fixture
def make(tiny: Any, workers: list[Workers]) -> Callable[..., HostGroup]:
    """A function that makes a group of two workers with options of an engine."""
    loaded = load_without_weights(tiny("llama"))

    def made(on_lost: Any = None, name: str | None = None, **options: Any) -> HostGroup:
        found = HostGroup(
            EngineConfig(str(tiny("llama")), hosts=2, **options), replace(loaded, name=name or "x"), on_lost
        )
        workers[-1].infos = [replace(INFO, identity=loaded.identity)] * 2
        return found

    return made


def test_workers_open_what_the_engine_was_asked_for(
    make: Callable[..., HostGroup], workers: list[Workers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"block_size": 16, "kv_bits": 8, "reproducible": True, "max_rows": 3, "attention": "reference"}
    made = make(name="a/hub-id", **settings)
    made.open()
    [asked] = workers[0].asked
    assert {name: getattr(asked, name) for name in settings} == settings
    assert (asked.model, asked.adapter, asked.dequantize) == ("a/hub-id", None, None)
    assert made.names == ("one", "two") and made.epoch == 1 and made.describe() == "metal in 2 workers"
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    make(name="folder").open()
    assert workers[-1].asked[0].model == str(tmp_path / "folder"), "a worker has another working directory"


def test_a_worker_with_other_files_is_refused_by_name_and_all_are_ended(
    make: Callable[..., HostGroup], workers: list[Workers]
) -> None:
    made = make()
    workers[0].infos[1] = replace(INFO, identity="another")
    with pytest.raises(HostRefused, match="two has other files"):
        made.open()
    assert workers[0].closed == 1


def test_lost_workers_are_started_again_a_few_times(make: Callable[..., HostGroup], workers: list[Workers]) -> None:
    made = make()
    made.open()
    workers[0].refusals.extend([HostLost("no network")] * (ATTEMPTS - 1))
    made.reopen()
    assert made.epoch == 1 + ATTEMPTS
    workers[0].refusals.extend([HostLost("no network")] * ATTEMPTS)
    with pytest.raises(HostLost, match="no network"):
        made.reopen()
    assert made.epoch == 1 + 2 * ATTEMPTS


def test_workers_that_are_not_there_are_not_told(make: Callable[..., HostGroup], workers: list[Workers]) -> None:
    made = make()
    made.open()
    assert made.stats() == ()
    held = MemoryInUse(7, 1, 0, 9, 9)
    workers[0].ranks = (RankState(held, (1,)),)
    assert made.stats() == (), "one of them has told nothing yet"
    workers[0].ranks *= 2
    assert made.stats() == (HostStats("one", 10, 7, 9), HostStats("two", 10, 7, 9))


def test_what_the_environment_sets_reaches_the_workers(
    make: Callable[..., HostGroup], workers: list[Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORTEXMLX_COMPARE_EVERY", "1")
    monkeypatch.setenv("CORTEXMLX_HANG_SECONDS", "3")
    made = make()
    made.open()
    assert workers[0].asked[0].compare_every == 1 and workers[0].limits == HangLimits(3.0, 300.0)
    for name in ("CORTEXMLX_HANG_SECONDS", "CORTEXMLX_COMPARE_EVERY"):
        with monkeypatch.context() as changed, pytest.raises(InvalidRequest, match=name):
            changed.setenv(name, "soon")
            make()
    assert len(workers) == 1, "it is refused before a worker is started"


def test_hosts_that_do_not_fit_are_not_tried_again(make: Callable[..., HostGroup], workers: list[Workers]) -> None:
    made = make()
    workers[0].refusals.append(HostRefused("other versions"))
    with pytest.raises(HostRefused):
        made.reopen()
    assert made.epoch == 1


def test_an_engine_that_is_closed_does_not_wait_for_its_workers(
    make: Callable[..., HostGroup], workers: list[Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(progress: Any) -> None:
        raise EngineClosed("closed")

    monkeypatch.setattr(group, "PAUSE_SECONDS", 1000.0)
    made = make(on_progress=closed)
    workers[0].refusals.append(HostLost("no network"))
    with pytest.raises(EngineClosed):
        made.reopen()


def test_an_engine_that_is_closed_while_workers_load_ends_them(
    make: Callable[..., HostGroup], workers: list[Workers]
) -> None:
    """The thread that opens them waits for their answers meanwhile."""
    reports: list[Any] = []

    def closed(progress: Any) -> None:
        reports.append(progress)
        if len(reports) > 2:
            raise EngineClosed("closed")

    made = make(on_progress=closed)
    workers[0].loading = threading.Event()
    with pytest.raises(EngineClosed):
        made.open()
    assert workers[0].closed and len(reports) == 3
    with pytest.raises(EngineClosed):
        workers[0].check()


def test_a_loss_is_told_with_the_epoch_of_the_workers_that_were_lost(
    make: Callable[..., HostGroup], workers: list[Workers]
) -> None:
    told: list[tuple[int, str]] = []
    made = make(on_lost=lambda epoch, lost: told.append((epoch, str(lost))))
    made.open()
    first = workers[0].action
    made.reopen()
    assert first is not None and workers[0].action is not None
    for action in (first, workers[0].action):
        thread = threading.Thread(target=action, args=(HostLost("gone"),))
        thread.start()
        thread.join()
    assert told == [(1, "gone"), (2, "gone")]
