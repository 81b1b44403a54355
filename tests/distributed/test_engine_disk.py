"""Engines with workers and a disk tier: each worker keeps its part, and a block is there only if all have theirs.

The workers are threads of this process here, each with a folder of its own. Nothing that happens to one of them is ever
a wrong token.
"""

from __future__ import annotations

import errno
import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.disk.segment_store import SegmentStore
from cortexmlx.stats import StoreState
from support.hosts.thread_workers import HostedStore, ThreadWorkers
from support.models.quantized_models import wide
from support.models.tiny import tokens_of
from support.patience import PATIENCE
from support.store.damage import DAMAGES
from support.store.restarts import LONG, check_restarts

KINDS = ["llama", "gemma3_text", "lfm2", *(pytest.param(k, marks=pytest.mark.slow) for k in ("deepseek_v3", "llama4"))]

Workers = list[ThreadWorkers]

pytestmark = pytest.mark.usefixtures("reading_is_faster")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def segments(folder: Path, rank: int) -> list[Path]:
    return sorted((folder / str(rank)).glob("*.safetensors"))


@pytest.mark.parametrize("name", KINDS)
def test_a_restart_finds_what_was_computed(
    name: str, tiny: Any, judged: Any, theirs: Any, tmp_path: Path, workers: Workers
) -> None:
    check_restarts(name, lambda: HostedStore(tiny(name), tmp_path).join(), judged, theirs)
    assert len(segments(tmp_path, 0)) > 0 < len(segments(tmp_path, 1))


def test_quantized_parts_come_back_and_are_nobody_elses(tmp_path: Path, workers: Workers) -> None:
    model = wide(tmp_path / "models", "llama")
    with HostedStore(model, tmp_path / "kv", kv_bits=8) as driver:
        right = driver.join().ask(LONG)
        assert right[1] == 0
    with HostedStore(model, tmp_path / "kv") as driver:
        assert driver.join().ask(LONG)[1] == 0
    with HostedStore(model, tmp_path / "kv", kv_bits=8) as driver:
        assert driver.join().ask(LONG) == (right[0], 88)


def test_what_left_memory_is_read_while_others_decode(tiny: Any, theirs: Any, tmp_path: Path, workers: Workers) -> None:
    with HostedStore(tiny("llama"), tmp_path) as driver:
        driver.join().ask(LONG)
        driver.forget()
        other = driver.add(tokens_of(9, seed=8), 60)
        driver.step(4)
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 88)
        assert list(driver.result(other).token_ids) == theirs("llama", tokens_of(9, seed=8), 60)
        counts = driver.counts
        assert counts.read_blocks == 11 <= counts.stored_blocks and counts.stored_bytes > 0 == counts.dropped_blocks
        driver.hear()
        assert not any(store._read or store._open for store in workers[0].stores.values()), "nothing is held"


def test_another_number_of_workers_finds_nothing_and_takes_nothing_away(
    tiny: Any, theirs: Any, tmp_path: Path, workers: Workers
) -> None:
    for hosts, cached in ((2, 0), (3, 0), (1, 0), (3, 88), (2, 88)):
        with HostedStore(tiny("llama"), tmp_path, hosts=hosts) as driver:
            assert driver.join().ask(LONG) == (theirs("llama", LONG, 10), cached)


def test_two_engines_share_their_folders(tiny: Any, theirs: Any, tmp_path: Path, workers: Workers) -> None:
    with HostedStore(tiny("llama"), tmp_path) as one, HostedStore(tiny("llama"), tmp_path) as two:
        one.join().ask(LONG)
        two.join()
        one.rest()
        two.core.disk._store._looked = 0.0  # type: ignore[union-attr]
        assert two.ask(tokens_of(40, seed=1))[1] == 0, "it looks again meanwhile"
        for store in workers[1].stores.values():
            assert store.flush(PATIENCE)
        two.hear_until(lambda: len(two.core.model._pieces._indexes) > 0)  # type: ignore[attr-defined]
        assert two.ask(LONG) == (theirs("llama", LONG, 10), 88)


# -- one rank cannot read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_is_damaged_is_computed_on_all_ranks(
    rank: int, tiny: Any, theirs: Any, tmp_path: Path, workers: Workers
) -> None:
    with HostedStore(tiny("llama"), tmp_path) as driver:
        driver.join().ask(LONG)
    for path in segments(tmp_path, rank):
        data = bytearray(path.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        path.write_bytes(data)
    with HostedStore(tiny("llama"), tmp_path) as driver:
        driver.join()
        found = []
        while not found or (found[-1] < 88 and len(found) < 12):  # a read ends at the first part that is damaged
            answer, cached = driver.ask(LONG)
            assert answer == theirs("llama", LONG, 10)
            found.append(cached)
            driver.forget()
        assert found[0] < found[-1] == 88, "what was damaged is written again"


@pytest.mark.parametrize("rank", [0, 1])
def test_files_that_are_gone_on_one_rank_are_a_miss(
    rank: int, tiny: Any, theirs: Any, tmp_path: Path, workers: Workers
) -> None:
    with HostedStore(tiny("llama"), tmp_path) as driver:
        driver.join().ask(LONG)
        driver.forget()
        for path in segments(tmp_path, rank):
            path.unlink()
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 0)
        driver.forget()
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 88)


@pytest.mark.parametrize("damages", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_a_damaged_store_of_some_rank_is_never_a_wrong_token(
    damages: int, tiny: Any, theirs: Any, tmp_path: Path, workers: Workers
) -> None:
    chance, read = random.Random(damages), 0
    prompts = [[*LONG[: 40 + 10 * (s % 4)], *tokens_of(30, seed=s)] for s in range(4)]
    answers = [theirs("llama", prompt, 10) for prompt in prompts]
    while damages > 0:
        with HostedStore(tiny("llama"), tmp_path) as driver:
            driver.join()
            for _ in range(min(4, damages)):
                damages -= 1
                for index in chance.sample(range(len(prompts)), 2):
                    assert driver.ask(prompts[index])[0] == answers[index], "a wrong token"
                driver.forget()
                chance.choice(DAMAGES)(chance, tmp_path / str(chance.randrange(2)))
            driver.core.check_invariants()
            read += driver.counts.read_blocks
    assert read > 0


def test_parts_of_other_shapes_are_not_taken(tiny: Any, theirs: Any, tmp_path: Path, workers: Workers) -> None:
    with HostedStore(tiny("llama"), tmp_path) as driver:
        driver.join().ask(LONG)
        driver.forget()
        runner = workers[0].stores[1]._runner
        right = runner.shapes
        changed = type("Runner", (), {"shapes": tuple(group[:-1] for group in right), "copy_out": runner.copy_out})()
        workers[0].stores[1]._runner = changed
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 0)


def test_a_rank_whose_disk_stands_still_keeps_nobody_waiting_twice(
    tiny: Any, theirs: Any, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HostedStore(tiny("llama"), tmp_path) as driver:
        driver.join().ask(LONG)
        driver.forget()
        monkeypatch.setattr("cortexmlx.disk.pieces.PATIENCE", 0.1)
        goes_on, read = threading.Event(), SegmentStore.read

        def stands_still(self: SegmentStore, *args: Any) -> Any:
            if self.path.name == "1":
                goes_on.wait(PATIENCE)
            return read(self, *args)

        monkeypatch.setattr(SegmentStore, "read", stands_still)
        driver.core.scheduler.costs.seconds_per_token = 1e-9
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 0)
        driver.forget()
        asked = driver.core.model._pieces._numbers  # type: ignore[attr-defined]
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 0)
        assert driver.core.model._pieces._numbers == asked, "nobody asks for a while"  # type: ignore[attr-defined]
        goes_on.set()


# -- one rank cannot write --------------------------------------------------------------------------------------------


def test_a_full_disk_of_one_rank_ends_no_answer_and_is_told_once(
    tiny: Any,
    theirs: Any,
    tmp_path: Path,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write, full = SegmentStore._write, [True]

    def refuses(self: SegmentStore, *args: Any) -> int:
        if self.path.name == "1" and full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *args)

    monkeypatch.setattr(SegmentStore, "_write", refuses)
    monkeypatch.setattr("cortexmlx.disk.store._PAUSE", 0.0)
    with HostedStore(tiny("llama"), tmp_path) as driver:
        driver.join()
        for seed in range(4):
            prompt = tokens_of(60, seed=seed)
            assert driver.ask(prompt) == (theirs("llama", prompt, 10), 0)
            driver.forget()
        assert driver.ask(prompt) == (theirs("llama", prompt, 10), 0), "rank 0 has it, which is not enough"
        counts = driver.counts
        assert counts.stored_blocks == counts.read_blocks == 0 < counts.dropped_blocks
        assert not driver.core.disk._can_copy, "nothing is copied meanwhile"  # type: ignore[union-attr]
        told = [said for said in warnings(caplog) if "rank 1" in said]
        assert len(told) == 1 and "No space left" in told[0] and len(warnings(caplog)) <= 2
        full[0] = False
        monkeypatch.setattr(driver.core.model._pieces, "_no_copies_until", 0.0)  # type: ignore[attr-defined]
        driver.ask(LONG)
        driver.forget()
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 88), "it goes on when there is room"


def test_a_folder_that_one_rank_cannot_use_is_one_warning_with_its_name(
    tiny: Any, theirs: Any, tmp_path: Path, workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "1").write_text("a file")
    with HostedStore(tiny("llama"), tmp_path) as driver:
        driver.join()
        assert driver.counts.state is StoreState.OFF
        assert [driver.ask(LONG) for _ in range(2)] == [(theirs("llama", LONG, 10), n) for n in (0, 89)]
        assert not segments(tmp_path, 0)
    assert any("rank 1" in said and "not used" in said and "File exists" in said for said in warnings(caplog))
