"""How far a batch is, in words: a line now and then in a log."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.cli.batch.command import BatchStatusLine
from cortexmlx.cli.batch.files import BatchWriter
from cortexmlx.cli.batch.run import BatchRun
from cortexmlx.cli.files import status_line
from cortexmlx.cli.files.stream import RecordStream
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import EngineClosed
from cortexmlx.protocols.batch import BatchRequest, LineStyle, RecordBuilder
from cortexmlx.protocols.request import Request
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.cli_fakes import FakeEngine
from support.patience import soon


def run_of(engine: Any, prompts: list[str]) -> BatchRun:
    params = SamplingParams(max_tokens=8)
    items = [BatchRequest(i, i, LineStyle.SIMPLE, Request((p,), params)) for i, p in enumerate(prompts, 1)]
    recorder = RecordBuilder("fake", 0, lambda token: b"")
    nothing = BatchWriter(RecordStream(Path(os.devnull)), RecordStream(Path(os.devnull)))
    return BatchRun(engine, items, nothing, lambda _, asked: asked, recorder, rows=1, in_order=True)


@pytest.mark.parametrize("total", [7, None])
def test_a_log_is_told_what_is_done_runs_and_is_left(
    total: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_line, "LOG_SECONDS", 0.05)
    engine: Any = FakeEngine(EngineConfig("fake", max_rows=1))
    run = run_of(engine, ["a", "!fail", "!slow", "!slow"])
    with BatchStatusLine(engine, run, total=total, live=True, done_before=3):
        run.run()
    out, err = capsys.readouterr()
    assert out == "" and err, "nothing of it goes to the results"
    of, left = ("/7", r" · [\d:]+( s)? left") if total else ("", "")
    counts = rf"([3-7]){of} done( · 1 failed)? · (\d) running · (\d) waiting"
    line = rf"cortexmlx: {counts} · \d+ tok/s · KV 1 MiB of 2 GiB({left})?"
    assert all(re.fullmatch(line, said) for said in err.splitlines()), err
    assert ("left" in err) is (total is not None)
    for said in err.splitlines() if total else ():
        assert sum(int(n) for n in re.match(line, said).group(1, 3, 4)) == total  # type: ignore[union-attr]


@dataclass
class Run:
    """What is counted of one, which does nothing."""

    done_count: int
    failed_count: int
    last_answer_seconds: float
    seconds: float


def progress_of(run: Any, total: int, rows: int) -> BatchStatusLine:
    engine: Any = FakeEngine(EngineConfig("fake", max_rows=rows))
    return BatchStatusLine(engine, run, total=total, live=False)


def test_the_time_that_is_left_counts_down_until_the_next_one_is_done() -> None:
    """Four of eight were done after three seconds, as many as run at once: the others take three more."""

    run = Run(done_count=4, failed_count=0, last_answer_seconds=3.0, seconds=3.0)
    progress = progress_of(run, total=8, rows=4)
    told = []
    for run.seconds in (3.0, 5.0, 9.0):
        told.append(progress._status_text().rpartition(" · ")[2])
    assert told == ["3 s left", "1 s left", "0 s left"]


def test_what_fails_at_once_tells_nothing_of_the_time_that_is_left() -> None:
    """Three lines of thirty were no requests, and nothing was answered yet: that is no reason to say 0 s."""

    run = Run(done_count=3, failed_count=3, last_answer_seconds=0.0, seconds=10.0)
    progress = progress_of(run, total=30, rows=16)
    assert "left" not in progress._status_text()
    run.done_count, run.last_answer_seconds, run.seconds = 12, 9.0, 9.0
    assert progress._status_text().endswith(" · 18 s left")


def test_an_engine_that_has_ended_ends_the_progress_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_line, "LOG_SECONDS", 0.01)

    class Ended:
        asked = 0

        def stats(self) -> None:
            self.asked += 1
            raise EngineClosed("the engine is closed")

    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    engine: Any = Ended()
    with BatchStatusLine(engine, run_of(engine, []), total=1, live=True):
        assert soon(lambda: engine.asked)
        time.sleep(0.2)  # and not once more
    assert engine.asked == 1 and raised == [] and capsys.readouterr().err == ""
