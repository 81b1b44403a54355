"""Unloading gives everything back: weights, keys and values, the tokenizer, threads and open files."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.server import ModelPool, ServedModel
from cortexmlx.system.machine import release_freed_memory
from support.models.tiny import write_tiny
from support.patience import soon

MIB = 1 << 20


def resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


KINDS = ("cortexmlx-models", "cortexmlx-store")
"""How the threads of a pool and of a store are called."""


def descriptors() -> set[str]:
    """Return the open files of this process that are files of somebody."""
    links = Path("/proc/self/fd").iterdir()
    return {os.readlink(link) for link in links if link.exists()}


def threads(before: Collection[threading.Thread]) -> list[str]:
    """Return the names of the threads of pools and stores that were not there before."""
    return [each.name for each in threading.enumerate() if each not in before and each.name.startswith(KINDS)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of more than 100 MiB in memory."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "head_dim": 64}
    return write_tiny(tmp_path_factory.mktemp("large") / "large", **sizes)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_unloading_gives_everything_back(large: Path, tmp_path: Path) -> None:
    store, seen, before = tmp_path / "store", [], set(threading.enumerate())
    gc.collect()
    release_freed_memory()  # what other tests of this process have freed, and malloc keeps
    begin = resident()

    def load(on_progress: Any) -> Engine:
        engine = Engine(str(large), kv_memory="64MB", kv_store=str(store), on_progress=on_progress)
        loaded = engine.inspect(lambda core: core.loaded)
        seen.extend(weakref.ref(each) for each in (loaded, loaded.model, loaded.tokenizer, engine))
        return engine

    with ModelPool([ServedModel("large", load, 5), ServedModel("other", load, 5)], memory=8) as pool:
        for turn, name in enumerate(("large", "other", "large")):
            lease = pool.acquire(name)
            answer = lease.engine.generate(list(range(1, 60)), SamplingParams(max_tokens=2, ignore_eos=True))
            assert answer.usage.completion_tokens == 2
            full, active = resident(), mx.get_active_memory()
            assert active > 100 * MIB
            lease.release()
            del lease, answer
            if turn == 0:
                first, files = full, descriptors()
        assert full < first + 50 * MIB and active < 300 * MIB and descriptors() <= files
        assert soon(lambda: len(threads(before)) == len(set(threads(before))) == 4), threads(before)  # of one store
    gc.collect()
    assert mx.get_active_memory() < active - 100 * MIB
    assert resident() < begin + 60 * MIB  # less than a model
    assert not [each() for each in seen if each() is not None]
    held = [str(tmp_path), str(large)]
    assert soon(lambda: not [path for path in descriptors() if any(name in path for name in held)]), descriptors()
    assert soon(lambda: not threads(before)), threads(before)
    assert any(store.rglob("*"))
