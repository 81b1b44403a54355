"""Engines with workers and a disk tier, while weights are hashed, ranks are lost, and requests end."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.distributed.disk import group_store
from cortexmlx.distributed.wire.overdue import HangLimits
from cortexmlx.errors import HostLost
from cortexmlx.stats import StoreState
from cortexmlx.types.request import RequestState
from support.hosts.thread_workers import HostedStore, ThreadWorkers
from support.models.tiny import tokens_of
from support.patience import PATIENCE
from support.store.hash_gate import hash_gate

pytestmark = pytest.mark.usefixtures("reading_is_faster")

LONG = tokens_of(90, seed=4)

Workers = list[ThreadWorkers]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- the identity -----------------------------------------------------------------------------------------------------


def test_nothing_is_read_or_kept_before_all_ranks_know_their_weights(
    tiny: Any, theirs: Any, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hash_gate(monkeypatch) as gate, HostedStore(tiny("llama"), tmp_path) as driver:
        driver.hear()
        assert driver.counts.state is StoreState.HASHING and driver.counts.hashed < 1.0
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 0)
        assert not driver.core.tidy() and driver.counts.stored_blocks == 0
        gate.opened.set()
        driver.join()
        driver.forget()
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 88), "what was cached is kept, too"


def test_a_rank_whose_files_cannot_be_hashed_leaves_all_without_a_store(
    tiny: Any, theirs: Any, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    with hash_gate(monkeypatch) as gate, HostedStore(tiny("llama"), tmp_path) as driver:
        gate.error = OSError(5, "Input/output error")
        gate.opened.set()
        driver.join()
        assert driver.counts.state is StoreState.OFF
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 0)
    assert any("(rank " in said and "could not be read" in said for said in warnings(caplog))


def test_a_lost_secret_of_one_rank_finds_nothing(tiny: Any, theirs: Any, tmp_path: Path, workers: Workers) -> None:
    with HostedStore(tiny("llama"), tmp_path) as driver:
        driver.join().ask(LONG)
    (tmp_path / "1" / "secret").unlink()
    with HostedStore(tiny("llama"), tmp_path) as driver:
        assert driver.join().ask(LONG) == (theirs("llama", LONG, 10), 0)


def test_weights_that_changed_find_nothing(tiny: Any, tmp_path: Path, workers: Workers) -> None:
    import mlx.core as mx

    model = tmp_path / "model"
    shutil.copytree(tiny("llama"), model)
    with HostedStore(model, tmp_path / "kv") as driver:
        driver.join().ask(LONG)
    (weights,) = model.glob("*.safetensors")
    arrays = mx.load(str(weights))
    assert isinstance(arrays, dict)
    name = next(n for n in arrays if "k_proj" in n)
    arrays[name] = arrays[name] * 1.001
    mx.save_safetensors(str(weights), arrays, {"format": "mlx"})
    with HostedStore(model, tmp_path / "kv") as driver:
        assert driver.join().ask(LONG)[1] == 0


# -- ranks that are lost ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_loss_the_index_is_asked_again(
    rank: int, tiny: Any, theirs: Any, tmp_path: Path, workers: Workers
) -> None:
    with HostedStore(tiny("llama"), tmp_path, resume_lost=True) as driver:
        driver.join().ask(LONG)
        driver.rest()
        workers[0].lose(rank)
        other = driver.add(tokens_of(12, seed=9), 30)
        driver.step(3)
        assert workers[0].epoch == 2 and driver.counts.state is StoreState.OPEN, "hashes are kept"
        driver.join()
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 88), "all that was in memory is lost"
        assert list(driver.result(other).token_ids) == theirs("llama", tokens_of(12, seed=9), 30)
        driver.core.check_invariants()


@pytest.mark.parametrize("moment", ["read", "planned", "asked"])
def test_what_was_read_before_a_loss_is_read_again(
    moment: str, tiny: Any, theirs: Any, tmp_path: Path, workers: Workers
) -> None:
    """Parts that workers had read are gone with them, whether their prompt waits, is about to begin, or begins."""
    with HostedStore(tiny("llama"), tmp_path, resume_lost=True) as driver:
        driver.join().ask(LONG)
        driver.forget()
        pieces = driver.core.model._pieces  # type: ignore[attr-defined]
        handle = driver.add(LONG, 10)
        driver.core.step()
        assert driver.core.idle and pieces._reads, "it is read"
        if moment != "asked":
            driver.hear_until(lambda: not pieces._reads)
            if driver.core.idle:
                driver.calls.get(timeout=PATIENCE)(driver.core)  # it has arrived
        if moment == "planned":
            plan = driver.core.scheduler.plan(0)
            assert plan is not None and len(plan.loads) == 11
        workers[0].lose(1)
        if moment == "asked":
            driver.core.recovery.recover(HostLost("rank 1 was killed", host="rank 1"))
            driver.await_start()
            assert not driver.core.idle, "its prompt waits for nothing of what is lost"
        driver.finish()
        assert list(driver.result(handle).token_ids) == theirs("llama", LONG, 10)
        assert workers[0].epoch == 2
        driver.core.check_invariants()
        driver.join()
        driver.forget()
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 88)


def test_an_idle_engine_that_loses_a_rank_while_it_copies_goes_on(
    tiny: Any, theirs: Any, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HostedStore(tiny("llama"), tmp_path) as driver:
        monkeypatch.setattr("cortexmlx.disk.connector.SHARE", 0.0)
        driver.join().ask(LONG)
        keep, times = group_store.GroupStore.keep, [0]

        def loses(self: Any, *args: Any) -> Any:
            times[0] += 1
            if times[0] == 2:
                workers[0].lose(0)
            return keep(self, *args)

        monkeypatch.setattr(group_store.GroupStore, "keep", loses)
        while driver.core.tidy():
            pass
        driver.await_start()
        assert workers[0].epoch == 2 and times[0] >= 2
        driver.join()
        assert driver.ask(LONG)[0] == theirs("llama", LONG, 10)
        driver.forget()
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 88)


def test_an_engine_that_begins_anew_reads_what_it_kept(
    tiny: Any, theirs: Any, tmp_path: Path, workers: Workers
) -> None:
    """As after an exception that landed between two statements."""
    with HostedStore(tiny("llama"), tmp_path) as driver:
        driver.join().ask(LONG)
        driver.rest()
        driver.add(LONG, 10)
        driver.step(2)
        driver.core.begin_anew()
        assert driver.join().ask(LONG) == (theirs("llama", LONG, 10), 88)
        driver.core.check_invariants()


def test_a_rank_that_hangs_while_only_a_read_is_awaited_is_found(
    tiny: Any, theirs: Any, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for an answer then, and no heartbeat is missing."""
    killed, reopen = threading.Event(), ThreadWorkers.reopen
    monkeypatch.setattr(ThreadWorkers, "reopen", lambda self: (killed.set(), reopen(self)))
    with HostedStore(tiny("llama"), tmp_path, resume_lost=True) as driver:
        killed.clear()
        driver.join().ask(LONG)
        driver.forget()
        monkeypatch.setattr(group_store, "LATE_SECONDS", 0.0)
        monkeypatch.setattr("cortexmlx.disk.pieces.PATIENCE", 0.1)
        driver.core.scheduler.costs.seconds_per_token = 1e-9
        driver.core.model._pieces._ranks._calls._limits = HangLimits(0.1, 0.1)  # type: ignore[attr-defined]
        monkeypatch.setattr(workers[0].stores[1], "read", lambda asks: killed.wait(PATIENCE))
        handle = driver.add(LONG, 10)
        driver.finish()
        assert list(driver.result(handle).token_ids) == theirs("llama", LONG, 10)
        assert workers[0].epoch == 2


# -- requests that end ------------------------------------------------------------------------------------------------


def test_what_was_read_for_a_cancelled_prompt_is_dropped_on_all_ranks(
    tiny: Any, theirs: Any, tmp_path: Path, workers: Workers
) -> None:
    with HostedStore(tiny("llama"), tmp_path) as driver:
        driver.join().ask(LONG)
        driver.forget()
        handle = driver.add(LONG, 10)
        driver.core.step()
        assert driver.core.idle and len(driver.core.scheduler.jobs) == 1, "it waits for what is read"
        driver.core.cancel(handle.id)
        driver.finish()
        assert handle.state is RequestState.CANCELLED
        pieces = driver.core.model._pieces  # type: ignore[attr-defined]
        driver.hear_until(lambda: not pieces._reads)
        driver.ask(tokens_of(9, seed=1))
        driver.hear()
        driver.ask(tokens_of(9, seed=2))
        assert not any(store._read or store._open for store in workers[0].stores.values())
        driver.core.check_invariants()
        assert driver.core.cache.stats().used_blocks == 0


def test_what_is_preempted_and_evicted_comes_back_right(
    tiny: Any, theirs: Any, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arena holds two of four texts."""
    monkeypatch.setattr("cortexmlx.disk.connector.SHARE", 1e9)
    monkeypatch.setattr("cortexmlx.disk.connector._SHARE_OF_A_STEP", 1e9)
    prompts = [tokens_of(70, seed=s) for s in range(4)]
    with HostedStore(tiny("llama"), tmp_path, tokens=200) as driver:
        driver.join()
        for _ in range(2):
            answers = driver.answers(prompts, 20, ignore_eos=False)
            assert [list(a) for a in answers] == [theirs("llama", p, 20) for p in prompts]
            driver.rest()
            driver.core.check_invariants()
        assert driver.counts.read_blocks > 10
