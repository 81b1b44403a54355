"""Engines whose model is in two processes of this machine: their answers are those of one process, and a lost process
ends no engine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine
from cortexmlx.distributed import group
from cortexmlx.distributed.overdue import MIN_SAMPLES
from cortexmlx.distributed.worker_group import WorkerGroup
from cortexmlx.errors import HostLost, HostRefused, InvalidRequest
from cortexmlx.structured.output import StructuredOutput
from support.engine.core_driver import Driver
from support.hosts import models
from support.hosts.launch import hanging_worker
from support.hosts.launch.processes import commands, workers
from support.hosts.mpi import with_mpi
from support.models.tiny import tokens_of, write_tiny
from support.patience import PATIENCE, soon

TOKENS = 160
"""Of keys and values on each worker, so that three rows do not fit at once."""

FORM = StructuredOutput.regex("[0-9]{12}")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two processes of this machine."""
    with with_mpi(tmp_path_factory.mktemp("mpi") / "bin"):
        yield "2:mpi"


@pytest.fixture(scope="module")
def two(hosts: str, tiny: Any) -> Iterator[Driver]:
    """A core whose model is in two workers, each with half of the heads: half as much memory holds the same tokens."""
    driver = Driver(tiny("llama"), tokens=TOKENS // 2, hosts=hosts)
    yield driver
    driver.core.release()


@pytest.fixture(scope="module")
def one(tiny: Any) -> Driver:
    """The same core in this process."""
    return Driver(tiny("llama"), tokens=TOKENS)


def ragged(driver: Driver) -> list[tuple[int, ...]]:
    prompts = [tokens_of(length, seed=length) for length in (5, 33, 61, 12, 40)]
    handles = [driver.add(prompt, 40, seed=n, temperature=0.9 * (n % 2)) for n, prompt in enumerate(prompts)]
    driver.step(9)
    driver.core.cancel(handles[3].id)
    driver.finish()
    return [driver.result(handle).token_ids for n, handle in enumerate(handles) if n != 3]


def shared_beginning(driver: Driver) -> list[tuple[int, ...]]:
    long = tokens_of(48, seed=7)
    first = driver.result_of(long, 8)
    again = driver.result_of([*long, *first.token_ids, *tokens_of(5, seed=8)], 8)
    assert again.usage.cached_tokens >= 48
    return [first.token_ids, again.token_ids]


def forks(driver: Driver) -> list[tuple[int, ...]]:
    answer = driver.result_of(tokens_of(19, seed=9), 12, n=3, temperature=1.0, logprobs=2)
    return [each.token_ids for each in (answer, *answer.others)]


def forms(driver: Driver) -> list[tuple[int, ...]]:
    answer = driver.result_of(tokens_of(10, seed=10), 30, structured=FORM, ignore_eos=False)
    assert answer.text.isdigit() and len(answer.text) == 12
    return [answer.token_ids]


def drafts(driver: Driver) -> list[tuple[int, ...]]:
    prompt, guesses = tokens_of(10, seed=11), tokens_of(3, seed=12)
    expected = driver.result_of(prompt, 20).token_ids
    handle = driver.add(prompt, 20)
    while not driver.core.idle:
        for job in driver.core.scheduler.draftable_jobs:
            right = expected[job.num_generated : job.num_generated + 2]
            driver.core.scheduler.set_drafts(job.id, [*right, *guesses][:3])
        driver.step()
    verified = driver.core.stats().speculation.verified
    assert verified > 0 and driver.result(handle).token_ids == expected
    return [expected]


def scores(driver: Driver) -> list[tuple[int, ...]]:
    answer = driver.result_of(tokens_of(30, seed=13), 1, prompt_logprobs=1)
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == 30
    return [tuple(round(each.logprob * 1000) for each in answer.prompt_logprobs if each is not None)]


@pytest.mark.parametrize("asked", [ragged, shared_beginning, forks, forms, drafts, scores])
def test_two_processes_answer_as_one(two: Driver, one: Driver, asked: Callable[[Driver], Any]) -> None:
    assert asked(two) == asked(one)
    two.core.check_invariants()
    processes = two.core.model._group._workers._processes  # type: ignore[attr-defined]
    assert not (processes._folder / "mlx").exists()  # what MLX compiles is kept, and not compiled at every start


def test_rows_were_preempted_in_both(two: Driver, one: Driver) -> None:
    """Or the test above would not show that preemption keeps the tokens."""
    assert ragged(two) == ragged(one)
    assert two.core.stats().preemptions > 0 and one.core.stats().preemptions > 0


def test_each_worker_has_its_part_of_the_weights_and_the_arena(two: Driver, one: Driver) -> None:
    stats, info = two.core.stats(), two.core.info
    assert len(stats.hosts) == 2 and "2 workers" in info.notes[-1]
    assert (info.weight_bytes, info.parameters) == (one.core.info.weight_bytes, one.core.info.parameters)
    together = sum(host.weight_bytes for host in stats.hosts)
    assert info.weight_bytes < together < 2 * info.weight_bytes, "embeddings and norms are in both"
    assert all(0 < host.kv_bytes == stats.kv_bytes // 2 for host in stats.hosts)
    assert info.kv_bytes_per_token == one.core.info.kv_bytes_per_token
    assert two.core.loaded.model is None


@pytest.mark.slow
def test_a_killed_process_ends_what_runs_and_the_next_request_is_answered(hosts: str, tiny: Any, theirs: Any) -> None:
    prompt = tokens_of(20, seed=1)
    before = set(commands())
    with Engine(str(tiny("llama")), hosts=hosts) as engine:
        expected = engine.generate(prompt, max_tokens=40, ignore_eos=True).token_ids
        assert list(expected) == theirs("llama", prompt, 40)
        for victim in (0, 1):
            handle = engine.submit(prompt, max_tokens=400, ignore_eos=True)
            next(iter(handle))
            os.kill(workers()[victim], signal.SIGKILL)
            with pytest.raises(HostLost) as lost:
                handle.result(PATIENCE)
            assert lost.value.host is not None
            assert engine.generate(prompt, max_tokens=40, ignore_eos=True).token_ids == expected
        assert engine.stats().host_losses == 2
        os.kill(workers()[0], signal.SIGKILL)
        soon(lambda: engine.stats().host_losses == 3)
        assert engine.generate(prompt, max_tokens=40, ignore_eos=True).token_ids == expected
    assert workers(before) == []


@pytest.mark.slow
def test_requests_begin_again_after_a_process_was_stopped(hosts: str, tiny: Any, theirs: Any) -> None:
    prompts, before = [tokens_of(20, seed=1), tokens_of(45, seed=2)], set(commands())
    with Engine(str(tiny("llama")), hosts=hosts, resume_lost=True) as engine:
        handles = [engine.submit(prompt, max_tokens=300, ignore_eos=True) for prompt in prompts]
        next(iter(handles[1]))
        stopped = workers()[1]
        os.kill(stopped, signal.SIGSTOP)
        answers = [list(handle.result(PATIENCE).token_ids) for handle in handles]
        assert stopped not in workers(before) and engine.stats().host_losses == 1
    assert answers == [theirs("llama", prompt, 300) for prompt in prompts]


@pytest.mark.slow
def test_a_process_that_hangs_while_its_heartbeats_come_is_lost(
    hosts: str, tiny: Any, theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "WorkerGroup", partial(WorkerGroup, worker=hanging_worker.COMMAND))
    monkeypatch.setenv(hanging_worker.FOLDER, str(tmp_path))
    before = set(commands())
    with Engine(str(tiny("llama")), hosts=hosts) as engine:
        for seed in range(2, 2 + MIN_SAMPLES):  # it learns how long steps take
            engine.generate(tokens_of(20, seed=seed), max_tokens=9, ignore_eos=True)
        hanging_worker.flag(tmp_path, 1).touch()
        with pytest.raises(HostLost, match=r"hangs.*while its heartbeats came") as lost:
            engine.generate(tokens_of(20, seed=1), max_tokens=40, ignore_eos=True)
        assert lost.value.host in ("this machine, rank 1", None), "a busy machine may hide it"
        answer = engine.generate(tokens_of(20, seed=1), max_tokens=40, ignore_eos=True)
        assert list(answer.token_ids) == theirs("llama", tokens_of(20, seed=1), 40)
        assert engine.stats().host_losses == 1
    assert workers(before) == []


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "kv_bits"), [("mpi", 8), ("mpi", 4), ("ring", None)])
def test_quantized_keys_and_the_ring_give_the_same_tokens(
    hosts: str, tmp_path: Path, backend: str, kv_bits: int | None
) -> None:
    folder, prompts = write_tiny(tmp_path / "wide", head_dim=64), [tokens_of(9, seed=1), tokens_of(21, seed=2)]
    two = Driver(folder, kv_bits=kv_bits, hosts=f"2:{backend}")
    try:
        assert two.answers(prompts, 10) == Driver(folder, kv_bits=kv_bits).answers(prompts, 10)
    finally:
        two.core.release()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in models.CUT), ("llama", 4), ("gpt_oss", 4)])
def test_parts_of_every_kind_of_layer_answer_as_one(hosts: str, tmp_path: Path, name: str, ranks: int) -> None:
    folder = models.write(tmp_path / "model", name)
    several, one = Driver(folder, hosts=f"{ranks}:mpi"), Driver(folder)
    try:
        for asked in (ragged, shared_beginning, forks):
            assert asked(several) == asked(one), asked
    finally:
        several.core.release()


@pytest.mark.slow
@pytest.mark.model
def test_the_starter_model_runs_on_three_processes_and_not_on_two(hosts: str) -> None:
    with pytest.raises(HostRefused, match="9 attention heads and 3 key-value heads cannot be divided by 2"):
        Engine("smollm2", hosts=hosts)
    prompt = tokens_of(12, seed=1)
    with Engine("smollm2", hosts="3:mpi") as several, Engine("smollm2") as one:
        answers = [engine.generate(prompt, max_tokens=12).token_ids for engine in (several, one)]
    assert answers[0] == answers[1]


ODD = {"num_attention_heads": 3, "num_key_value_heads": 1}
"""Heads that two workers cannot divide, so that they are a pipeline."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "qwen3_5"])
def test_a_pipeline_of_two_processes_answers_as_one(hosts: str, tmp_path: Path, name: str) -> None:
    folder = models.write(tmp_path / "model", name, num_hidden_layers=4, **ODD)
    two, one = Driver(folder, hosts=hosts), Driver(folder)
    try:
        for asked in (ragged, shared_beginning, forks, forms):
            assert asked(two) == asked(one), asked
        layers = [{layer for group in info.groups for layer in group.layers} for info in two.core.model._group.infos]
        assert [len(each) for each in layers] == [2, 2], "each worker has half of the layers"
        assert two.core.info.parameters == one.core.info.parameters
        assert two.core.info.weight_bytes == one.core.info.weight_bytes
    finally:
        two.core.release()


@pytest.mark.slow
def test_what_cannot_be_cut_is_refused_by_name_and_leaves_no_process(hosts: str, tiny: Any) -> None:
    before = set(commands())
    with pytest.raises(HostRefused, match=r"rank \d: .*cannot be cut for 3 hosts"):
        Engine(str(tiny("llama")), hosts="3:mpi")
    with pytest.raises(InvalidRequest, match="holds no block"):
        Engine(str(tiny("llama")), hosts=hosts, kv_memory=100)
    assert workers(before) == []
