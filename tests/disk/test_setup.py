"""A store whose model's weights are still being hashed when the engine is open: nobody waits, nothing is wrong."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.disk.folder import HASHES
from cortexmlx.stats import StoreState
from support.models.tiny import tokens_of
from support.patience import PATIENCE, soon
from support.store.hash_gate import Gate, hash_gate
from support.store.stored import Stored, reading_pays

LONG = tokens_of(90, seed=4)


@pytest.fixture(autouse=True)
def _reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    reading_pays(monkeypatch)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    with hash_gate(monkeypatch) as gate:
        yield gate


def opened(gate: Gate, driver: Stored) -> None:
    """Let the files be hashed, and the core be told."""
    gate.opened.set()
    driver.calls.get(timeout=PATIENCE)(driver.core)


def state(driver: Stored) -> tuple[StoreState, float]:
    return driver.counts.state, driver.counts.hashed


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", ["llama", "gemma3n", pytest.param("lfm2", marks=pytest.mark.slow)])
def test_what_is_computed_before_the_hash_is_known_is_stored_after_it(
    name: str, tiny: Any, theirs: Any, tmp_path: Path, gate: Gate
) -> None:
    with Stored(tiny(name), tmp_path) as driver:
        assert state(driver) == (StoreState.HASHING, 0.0)
        assert driver.ask(LONG) == (theirs(name, LONG, 10), 0)
        assert not driver.core.tidy() and driver.counts.stored_blocks == 0, "it has no name yet"
        opened(gate, driver)
        assert state(driver) == (StoreState.OPEN, 1.0)
        driver.rest()
        assert driver.counts.stored_blocks > 0
    gate.opened.clear()
    with Stored(tiny(name), tmp_path) as driver:
        assert state(driver) == (StoreState.OPEN, 1.0), "the hash is kept"
        assert driver.ask(LONG) == (theirs(name, LONG, 10), 88)


def test_what_another_engine_stored_is_found_once_the_hash_is_known(
    tiny: Any, theirs: Any, tmp_path: Path, gate: Gate
) -> None:
    gate.opened.set()
    with Stored(tiny("llama"), tmp_path) as driver:
        if driver.counts.state is StoreState.HASHING:
            opened(gate, driver)
        driver.ask(LONG)
    gate.opened.clear()
    (tmp_path / HASHES).unlink()
    other = [*LONG[:50], *tokens_of(30, seed=2)]
    with Stored(tiny("llama"), tmp_path) as driver:
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 0)
        assert driver.counts.read_blocks == driver.counts.missed_blocks == 0, "nothing is looked for"
        handle = driver.add(other, 40)
        driver.step(3)
        opened(gate, driver)
        driver.finish()
        assert list(driver.result(handle).token_ids) == theirs("llama", other, 40), "it ran meanwhile"
        driver.forget()
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 88)
        assert driver.counts.read_blocks == 11
        driver.core.check_invariants()


def _deleted(file: Path, gate: Gate) -> None:
    file.unlink()


def _written_again(file: Path, gate: Gate) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x80
    file.write_bytes(data)


def _unreadable(file: Path, gate: Gate) -> None:
    gate.error = OSError(5, "Input/output error")


def _no_memory(file: Path, gate: Gate) -> None:
    gate.error = MemoryError()


TROUBLES = [_deleted, _written_again, _unreadable, _no_memory]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_files_that_cannot_be_hashed_leave_an_engine_without_a_store(
    trouble: Callable[[Path, Gate], None],
    tiny: Any,
    theirs: Any,
    tmp_path: Path,
    gate: Gate,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    with Stored(model, tmp_path / "kv") as driver:
        driver.ask(LONG)
        trouble(model / "model.safetensors", gate)
        opened(gate, driver)
        assert state(driver) == (StoreState.OFF, 1.0)
        driver.core.reset()
        assert driver.counts.state is StoreState.OFF and driver.core.cache.disk_tier is None, (
            "nothing is collected for it"
        )
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 0)
        assert driver.ask(LONG)[1] >= 88, "memory has it"
        driver.rest()
        assert driver.counts.stored_blocks == driver.counts.read_blocks == 0
    (warning,) = warnings(caplog)
    assert "could not be read" in warning and str(tmp_path / "kv") in warning
    assert not (tmp_path / "kv" / HASHES).exists()


def test_weights_that_an_app_changes_while_their_files_are_hashed_have_no_store(
    tiny: Any, tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    with Stored(tiny("llama"), tmp_path) as driver:
        weight = driver.core.loaded.model.layers[0].self_attn.v_proj
        weight.weight[0] = -weight.weight[0]
        driver.ask(LONG)
        opened(gate, driver)
        assert driver.counts.state is StoreState.OFF
        driver.ask(LONG)
        driver.rest()
        assert driver.counts.stored_blocks == 0
    assert "changed in memory" in warnings(caplog)[0] and len(warnings(caplog)) == 1


def test_an_engine_that_begins_anew_meanwhile_joins_all_the_same(
    tiny: Any, theirs: Any, tmp_path: Path, gate: Gate
) -> None:
    with Stored(tiny("llama"), tmp_path) as driver:
        driver.ask(LONG)
        driver.core.reset()
        opened(gate, driver)
        driver.ask(LONG)
        driver.forget()
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 88)


def test_closing_waits_for_no_hash_and_ends_its_threads(tiny: Any, tmp_path: Path, gate: Gate) -> None:
    before = threading.active_count()
    with Stored(tiny("llama"), tmp_path) as driver:
        driver.ask(LONG)
    gate.opened.set()
    assert soon(lambda: threading.active_count() <= before)
    assert driver.calls.empty() and not (tmp_path / HASHES).exists()


def test_an_idle_engine_stores_what_it_has_as_soon_as_the_hash_is_known(tiny: Any, tmp_path: Path, gate: Gate) -> None:
    with Engine(tiny("llama"), kv_memory="1MB", block_size=8, kv_store=tmp_path) as engine:
        engine.generate(LONG, SamplingParams(max_tokens=4, ignore_eos=True))
        gate.opened.set()

        def stored() -> bool:
            store = engine.stats().kv_store
            return store is not None and store.stored_blocks >= 11

        assert soon(stored)
