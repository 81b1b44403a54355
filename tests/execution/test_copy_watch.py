"""A copy of a slab is told once, with its size. Whoever else allocates is not taken for one."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.execution import paged_memory
from cortexmlx.execution.paged_memory import CopyWatch, WriteMoment
from cortexmlx.kv.arena import KVArena
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.stats import ArenaWrites
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of, write_tiny

HEADS, DIM, SIZE, BLOCKS = 2, 64, 32, 256
WIDE = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIM}
LAYERS = 5
SHAPES = {"one layer": ("one layer", {}), "many layers": ("llama", {"num_hidden_layers": LAYERS})}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def model(name: str) -> Path:
        if name not in made:
            kind, changes = SHAPES[name]
            made[name] = write_tiny(
                folder / name.replace(" ", "-"), kind, max_position_embeddings=8192, **WIDE, **changes
            )
        return made[name]

    return model


def driver(model: Path, **config: Any) -> Driver:
    """An engine's core whose arena of 4 MiB for each layer's keys, and as much for its values, does not grow."""
    made = Driver(model, tokens=8192, block_size=SIZE, prefill_budget=64, **config)
    made.core.cache.pools.grow(made.core.cache.pools.max_blocks)
    return made


def writes(driven: Driver) -> ArenaWrites:
    return driven.core.stats().arena_writes


def flushes(driven: Driver, prompt: int = 40) -> None:
    """A prompt, a window of decode steps, and its flush."""
    driven.add(tokens_of(prompt, seed=prompt), 24)
    driven.finish()


@pytest.mark.parametrize(("layers", "moment"), zip(SHAPES, WriteMoment, strict=True))
def test_a_slab_that_is_held_is_told_once_with_its_size(
    layers: str, moment: WriteMoment, models: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    driven = driver(models(layers))
    last = len(driven.core.runner.arena.groups[0].layers) - 1
    driven.add(tokens_of(40), 24)
    if moment is WriteMoment.FLUSH:
        driven.step(10)
    else:
        driven.finish()
    assert writes(driven).measured and not writes(driven).copied
    keys, values = driven.core.runner.arena.slab(last)
    held = [keys[:, :1], values[:, 3:5]]
    mx.eval(held)
    size = keys.nbytes
    del keys, values
    with caplog.at_level(logging.WARNING, "cortexmlx"):
        if moment is WriteMoment.FLUSH:
            driven.finish()
        else:
            driven.add(tokens_of(30, seed=9), 1)
            driven.step()
        told = writes(driven)
        assert (told.copied, told.copied_bytes) == (2, 2 * size)
        flushes(driven, 50)
    assert writes(driven).copied == 2 and writes(driven).measured > told.measured
    [record] = caplog.records
    assert f"{format_bytes(2 * size)} of the KV cache" in record.getMessage() and "2 of " in record.getMessage()


def test_every_copy_is_counted_and_only_the_first_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    arena, watch = KVArena([LayerGroup(KVSpec(HEADS, DIM, DIM, "float32"), (0, 1))], BLOCKS, SIZE), CopyWatch()
    with caplog.at_level(logging.WARNING):
        for number in range(1, 4):
            view = arena.slab(1)[1][:, :2]
            mx.eval(view)
            one_write(arena, watch)
            assert watch.writes == ArenaWrites(4 * number, number, number * arena.slab(1)[1].nbytes)
    assert len(caplog.records) == 1
    view = arena.slab(0)[0][:, :2]
    one_write(arena, watch)
    assert watch.writes.measured == 12, "enough was measured"
    assert view.shape[1] == 2
    arena.resize(2 * BLOCKS)
    one_write(arena, watch)
    assert watch.writes.measured == 16, "the arena has grown"


def one_write(arena: KVArena, watch: CopyWatch, moment: WriteMoment = WriteMoment.FLUSH) -> None:
    slots = mx.array(np.arange(8, dtype=np.int32))
    for layer in arena.group_of:
        arena.write(layer, slots, *(mx.ones((a.shape[0], 8, a.shape[2]), a.dtype) for a in arena.slab(layer)))
    watch.evaluate(moment, arena, HEADS * DIM * 8 * 4)


def test_neither_the_peak_nor_its_reset_belongs_to_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset() -> None:
        raise AssertionError("an app may be measuring")

    arena, watch = KVArena([LayerGroup(KVSpec(HEADS, DIM, DIM, "float32"), (0,))], BLOCKS, SIZE), CopyWatch()
    monkeypatch.setattr(mx, "reset_peak_memory", reset)
    one_write(arena, watch)
    assert watch.writes == ArenaWrites(2)


def test_a_slab_that_is_given_back_at_once_shows_in_the_cache_or_in_the_peak() -> None:
    """As an operation in flight holds it: the bytes in use are the same afterwards."""
    now = paged_memory._MemoryCounts
    assert now(1000, 900, 5000).was_copied(now(1000, 500, 5000), 400, 8) is True
    assert now(1000, 500, 1405).was_copied(now(1000, 500, 1200), 400, 8) is True
    assert now(1400, 100, 5000).was_copied(now(1000, 500, 5000), 400, 8) is True, "the new buffer came from the cache"
    assert now(1004, 500, 1004).was_copied(now(1000, 500, 1000), 400, 8) is False
    assert now(1100, 500, 5000).was_copied(now(1000, 500, 5000), 400, 8) is None
    assert now(1000, 100, 5000).was_copied(now(1000, 500, 5000), 400, 8) is None
    assert now(1000, 500, 1300).was_copied(now(1000, 500, 1200), 400, 8) is None


@pytest.fixture
def another_engine() -> Iterator[None]:
    """A thread that allocates and frees arrays of other sizes than the slabs'. One of the very same size, at the very
    moment, and none around it, cannot be told from a copy.
    """
    stop, size = threading.Event(), HEADS * (BLOCKS + 2) * SIZE * DIM

    def work() -> None:
        sizes = random.Random(0)
        while not stop.is_set():
            array = mx.ones((sizes.choice([size // 3, size * 7 // 4, 3000]),))
            mx.eval(array)
            del array

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stop.set()
    thread.join()


def test_who_else_allocates_is_not_accused(another_engine: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            arena, watch = (
                KVArena([LayerGroup(KVSpec(HEADS, DIM, DIM, "float32"), (0, 1, 2, 3))], BLOCKS, SIZE),
                CopyWatch(),
            )
            for _ in range(20):
                one_write(arena, watch)
                time.sleep(0)
            assert not watch.writes.copied
            assert watch._attempts[WriteMoment.FLUSH] <= 12, "it gives up"
    assert not caplog.records


def test_a_copy_after_which_it_is_not_quiet_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes may be another engine's. The copy itself is real here."""
    arena, watch = KVArena([LayerGroup(KVSpec(HEADS, DIM, DIM, "float32"), (0,))], BLOCKS, SIZE), CopyWatch()
    others: list[mx.array] = []

    def sleep(seconds: float) -> None:
        others.append(mx.ones(5000))
        mx.eval(others)

    view = arena.slab(0)[0][:, :1]
    mx.eval(view)
    with monkeypatch.context() as patched:
        patched.setattr(paged_memory.time, "sleep", sleep)
        one_write(arena, watch)
    assert others and watch.writes == ArenaWrites()
    view = arena.slab(0)[0][:, :1]
    mx.eval(view)
    one_write(arena, watch)
    assert watch.writes.copied == 1 and view.shape[1] == 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_fuzzed_runs_are_never_accused(
    seed: int, models: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts, forks, cancelled answers, growth, pressure, and an app that resets the peak."""
    chance = random.Random(seed)
    driven = Driver(models(chance.choice(list(SHAPES))), tokens=8192, block_size=SIZE, prefill_budget=64)
    with caplog.at_level(logging.WARNING):
        for _ in range(120):
            do = chance.random()
            if do < 0.2:
                driven.add(tokens_of(chance.randint(1, 300), seed=chance.randint(0, 5)), chance.randint(1, 40))
            elif do < 0.23:
                driven.core.cancel(chance.randint(1, 30))
            elif do < 0.26:
                driven.core.relieve(chance.random() < 0.5)
            elif do < 0.3:
                driven.core.cache.pools.grow(driven.core.cache.pools.max_blocks)
            elif do < 0.35:
                mx.reset_peak_memory()
            driven.step()
        driven.finish()
    told = writes(driven)
    assert told.measured and not told.copied and not caplog.records


def test_a_small_arena_is_not_measured_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, watch = KVArena([LayerGroup(KVSpec(HEADS, DIM, DIM, "float32"), (0,))], 4, SIZE), CopyWatch()
    monkeypatch.setattr(arena, "write_scratch_slots", None)
    watch.measure_scratch_write(arena)
    one_write(arena, watch)
    assert watch.writes == ArenaWrites() and not watch._attempts
