"""Work on a thread that nobody has to wait for: it is followed, stopped, and its end handed on."""

from __future__ import annotations

import threading
import time

import pytest

from cortexmlx.models.hub import DownloadProgress, DownloadStopped, run_in_background
from cortexmlx.types.progress import Progress
from support.patience import PATIENCE, soon


def test_what_the_work_returns_or_raises_comes_back() -> None:
    assert run_in_background(lambda tally: 42, lambda news: None) == 42
    with pytest.raises(OSError, match="a disk"):
        run_in_background(lambda tally: (_ for _ in ()).throw(OSError("a disk")), lambda news: None)


def test_progress_is_told_on_the_callers_thread_and_ends_with_all() -> None:
    seen: list[Progress] = []
    threads = set()

    def work(tally: DownloadProgress) -> None:
        tally.expect_file(1000, cached=100)
        for number in range(9):
            tally.add(100)
            tally.pause(0.04)
            assert soon(lambda count=number: len(seen) >= min(count, 2))

    def told(news: Progress) -> None:
        threads.add(threading.current_thread())
        seen.append(news)

    run_in_background(work, told)
    assert threads == {threading.current_thread()}
    assert len(seen) >= 3 and [news.done for news in seen] == sorted(news.done for news in seen)
    last = seen[-1]
    assert (last.what, last.done, last.total, last.cached) == ("downloading", 1000, 1000, 100)
    assert 0 < seen[-2].rate < 900 / 0.2, "what was there before did not come now"
    assert last.seconds_left == 0


def test_bytes_that_were_here_before_are_no_speed() -> None:
    tally = DownloadProgress()
    tally.expect_file(1000, cached=0)
    assert tally.progress().rate == 0
    tally.expect_file(10**9, cached=10**9)
    time.sleep(0.01)
    tally.add(10)
    assert 0 < tally.progress().rate <= 1000


def test_a_callback_that_raises_ends_the_waiting_at_once_and_the_work_soon() -> None:
    ended = threading.Event()

    def work(tally: DownloadProgress) -> None:
        try:
            while True:
                tally.add(1)
                tally.pause(0.001)
        except DownloadStopped:
            ended.set()

    def stop(news: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_background(work, stop)
    assert ended.wait(PATIENCE)


def test_work_that_hears_nothing_is_left_alone() -> None:
    """Such as a connection that stays silent: whoever waits for it goes, the thread does not keep the program."""
    silent = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        run_in_background(lambda tally: silent.wait(PATIENCE), lambda news: (_ for _ in ()).throw(KeyboardInterrupt))
    (left,) = [t for t in threading.enumerate() if t.name == "cortexmlx-download" and t.is_alive()][-1:]
    assert left.daemon
    silent.set()
