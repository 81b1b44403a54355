"""Engines whose model is in processes of this machine, which share one folder of the disk tier."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine
from support.engine.core_driver import Driver
from support.hosts import models
from support.hosts.environment import with_mpi
from support.hosts.launch.processes import workers
from support.hosts.thread_workers import HostedStore
from support.models.tiny import tokens_of
from support.patience import PATIENCE, soon

pytestmark = pytest.mark.usefixtures("reading_is_faster")

LONG = tokens_of(90, seed=4)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two processes of this machine."""
    with with_mpi(tmp_path_factory.mktemp("mpi") / "bin"):
        yield "2:mpi"


def test_a_restart_finds_what_both_processes_kept(hosts: str, tiny: Any, theirs: Any, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with HostedStore(tiny("llama"), tmp_path, hosts=hosts) as driver:
            answer, cached = driver.join().ask(LONG)
            assert answer == theirs("llama", LONG, 10)
            found.append(cached)
            driver.forget()
            assert driver.ask(LONG) == (answer, 88), "what has left memory is on disk"
            assert driver.counts.dropped_blocks == 0
    assert found == [0, 88]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_states_and_windows_are_found_by_processes(
    name: str, hosts: str, tiny: Any, judged: Any, theirs: Any, tmp_path: Path
) -> None:
    from support.engine.judge import NOISE, disagreement

    for cached in (0, 88):
        with HostedStore(tiny(name), tmp_path, hosts=hosts) as driver:
            answer, found = driver.join().ask(LONG)
            gap = disagreement(judged(name)[0], LONG, answer, theirs(name, LONG, 10))
            assert (gap is None or gap[1] < NOISE) and found == cached


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [("qwen2", "2:mpi"), ("qwen3_5", "4:mpi")])
def test_what_the_hosts_of_a_pipeline_keep_is_found(hosts: str, tmp_path: Path, name: str, number: str) -> None:
    """Four of them have one layer each: three a state and no keys, one keys and no state."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    folder, found = models.write(tmp_path / "model", name, num_hidden_layers=4, **heads), []
    one = Driver(folder)
    handle = one.add(LONG, 10)
    one.finish()
    right = list(one.result(handle).token_ids)
    for _ in range(2):
        with HostedStore(folder, tmp_path / "kv", hosts=number) as driver:
            for _ in range(2):
                answer, cached = driver.join().ask(LONG)
                driver.forget()
                assert answer == right
                found.append(cached)
    assert found == [0, 88, 88, 88]


@pytest.mark.slow
def test_other_numbers_of_processes_and_the_ring_share_a_folder(
    hosts: str, tiny: Any, theirs: Any, tmp_path: Path
) -> None:
    """What a number of processes keeps is that number's alone, whatever moves the numbers between them."""
    for number, cached in (("2:mpi", 0), ("1:mpi", 0), ("2:ring", 88), ("1:mpi", 88)):
        with HostedStore(tiny("llama"), tmp_path, hosts=number) as driver:
            assert driver.join().ask(LONG) == (theirs("llama", LONG, 10), cached), number


@pytest.mark.slow
def test_processes_that_are_killed_while_they_write_spoil_nothing(
    hosts: str, tiny: Any, theirs: Any, tmp_path: Path
) -> None:
    """Two engines share a small folder, and lose workers at any moment. Each answer is right, and so are the later
    ones.
    """
    prompts = [tokens_of(90, seed=s) for s in range(6)]
    answers = [theirs("llama", prompt, 10) for prompt in prompts]
    chance = random.Random(7)
    config: dict[str, Any] = {"kv_store": tmp_path, "kv_store_bytes": "400KB", "kv_memory": "64KB", "block_size": 8}
    config |= {"max_rows": 4, "resume_lost": True, "hosts": hosts}
    with Engine(str(tiny("llama")), **config) as one, Engine(str(tiny("llama")), **config) as two:
        engines = (one, two)
        for turn in range(12):
            engine, own = engines[turn % 2], chance.sample(range(len(prompts)), 3)
            handles = [engine.submit(prompts[n], max_tokens=10, temperature=0.0, ignore_eos=True) for n in own]
            if turn % 4 == 2:
                os.kill(chance.choice(workers()), signal.SIGKILL)
            assert [list(h.result(PATIENCE).token_ids) for h in handles] == [answers[n] for n in own]
        assert soon(lambda: sum(engine.stats().host_losses for engine in engines) >= 3)
        read = sum(engine.stats().kv_store.read_blocks for engine in engines)  # type: ignore[union-attr]
    assert workers() == []
    with Engine(str(tiny("llama")), **config) as engine:
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(engine.generate(prompt, max_tokens=10, temperature=0.0, ignore_eos=True).token_ids) == answer
        last = engine.stats().kv_store
    assert last is not None and read + last.read_blocks > 0
    assert not list(tmp_path.glob("*.unfinished"))
