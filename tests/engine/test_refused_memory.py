"""Memory that the system refuses: the arena stays as it is, requests go on or fail with the numbers, and nothing
crashes. Each program limits its own address space.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.errors import KVCacheFull, OutOfMemory
from cortexmlx.kv.arena import KVArena
from cortexmlx.types.request import FinishReason
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.refusals import SAID
from support.models.tiny import tokens_of, write_tiny
from support.patience import PATIENCE

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is not enforced there")

HEAD = """
import json, resource, sys
from cortexmlx import CortexError, Engine, SamplingParams
from support.models.tiny import tokens_of

def leave(megabytes):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20,) * 2)

def outcome(handle):
    try:
        return len(handle.result().token_ids)
    except CortexError as error:
        return f"{type(error).__name__}: {error}"

wide, narrow = sys.argv[1:]
asked = SamplingParams(max_tokens=12, ignore_eos=True)
"""

GROWING = """
with Engine(wide, kv_memory="4GB", max_rows=16, token_target=None) as engine:
    engine.generate(tokens_of(500, seed=99), asked)
    before = engine.stats()
    leave(200)
    lengths = [3000] + [400] * 7
    handles = [engine.submit(tokens_of(n, seed=i), asked) for i, n in enumerate(lengths)]
    outcomes = [outcome(h) for h in handles]
    outcomes.append(outcome(engine.submit(tokens_of(50), asked)))
    try:
        outcomes.append(outcome(engine.submit(tokens_of(3000), asked)))
    except CortexError as error:
        outcomes.append(f"{type(error).__name__}: {error}")
    engine.check_invariants()
    after = engine.stats()
    print(json.dumps([outcomes, before.total_blocks, after.total_blocks, after.kv_bytes_limit, before.kv_bytes]))
"""

BEGINNING = """
with Engine(narrow) as engine:
    engine.generate(tokens_of(50), asked)
leave(200)
try:
    Engine(wide, kv_memory="4GB")
except CortexError as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
with Engine(narrow, kv_memory="64KB") as engine:
    print(json.dumps(outcome(engine.submit(tokens_of(20), asked))))
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of few weights and 128 KiB of keys and values per token: 256 MiB are 2048 tokens."""
    shape = {"num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 1024, "max_position_embeddings": 8192}
    return write_tiny(tmp_path_factory.mktemp("wide") / "wide", **shape)


def run(program: str, *models: Path) -> list[Any]:
    """What the program prints, a JSON value per line. Fails if it does not end well."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", HEAD + program, *map(str, models)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"it ended with {done.returncode}: {done.stderr[-2000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


@LINUX
@pytest.mark.slow
def test_an_arena_that_may_not_grow_stays_and_every_request_has_an_end(tiny: Any, wide: Path) -> None:
    [[outcomes, before, after, limit, size]] = run(GROWING, wide, tiny("one layer"))
    assert outcomes[0].startswith("KVCacheFull: the prompt has 3000 tokens and the KV cache holds 2048"), outcomes[0]
    assert outcomes[1:8] == [12] * 7, "those that fit one after another are answered"
    assert outcomes[8] == 12, "the engine goes on"
    assert re.match(r"KVCacheFull: the prompt has 3000 .* the system refuses it more memory now", outcomes[9])
    assert before == 64 <= after < 3000 // 32, "a part of what is asked for again may be there"
    assert limit <= size * after // before


@LINUX
def test_a_first_arena_that_is_refused_is_an_error_with_the_numbers(tiny: Any, wide: Path) -> None:
    error, tokens = run(BEGINNING, wide, tiny("one layer"))
    assert error.startswith("MemoryRefused: the system refuses 264 MiB"), error
    assert tokens == 12, "a smaller one can be had"


@pytest.mark.parametrize("where", ["mlx.core.load", "cortexmlx.core.in_process_model.check_logits"])
def test_a_model_that_is_refused_memory_is_not_called_damaged(
    where: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **more: Any) -> None:
        raise RuntimeError(SAID)

    monkeypatch.setattr(where, refused)
    with pytest.raises(OutOfMemory, match=r"while the model was loaded \(\[malloc\] Unable .*smaller model"):
        Engine(tiny("one layer"))


# -- what a core makes of it, with a system that refuses at will ------------------------------------------------------


@pytest.fixture
def generous(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """What the system answers from now on: its last element."""
    answers = [True]
    monkeypatch.setattr("cortexmlx.kv.arena.can_allocate", lambda size: answers[-1])
    yield answers


def test_a_lone_answer_that_outgrows_the_arena_ends_where_it_is_full(
    tiny: Any, theirs: Any, generous: list[bool]
) -> None:
    driver = Driver(tiny("one layer"), tokens=4096, max_request_tokens=400)
    driver.core.relieve(True)
    prompt = tokens_of(20, seed=3)
    handle = driver.add(prompt, 300)
    driver.step(30)
    generous.append(False)
    driver.finish()
    result, held = driver.result(handle), driver.core.cache.tables.capacity_tokens
    assert result.finish_reason is FinishReason.LENGTH
    assert len(result.token_ids) == held + 1 - len(prompt) < 300
    assert list(result.token_ids) == theirs("one layer", prompt, 300)[: len(result.token_ids)]
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize("steps", [1, 3, 8, 20])
def test_rows_go_on_or_are_preempted_when_memory_is_refused(
    tiny: Any, theirs: Any, generous: list[bool], steps: int
) -> None:
    driver = Driver(tiny("llama"), tokens=4096, max_rows=4)
    driver.core.relieve(True)
    prompts = [tokens_of(n, seed=n) for n in (30, 9, 50, 21)]
    handles = [driver.add(p, 60) for p in prompts]
    driver.step(steps)
    generous.append(False)
    driver.finish()
    held = driver.core.cache.tables.capacity_tokens
    for prompt, handle in zip(prompts, handles, strict=True):
        if len(prompt) > held:
            with pytest.raises(KVCacheFull, match=f"{len(prompt)} tokens and the KV cache holds {held}"):
                driver.result(handle)
            continue
        answer = list(driver.result(handle).token_ids)
        assert answer == theirs("llama", prompt, 60)[: min(60, held + 1 - len(prompt))]
    assert_nothing_lost(driver.core.stats())


def test_an_arena_that_is_refused_in_the_middle_of_a_step_stays_and_all_go_on_in_it(
    tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tiny("llama"), kv_memory="16MB", max_rows=8) as engine:
        real = KVArena.can_resize
        asked = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0)
        size = engine.stats().total_blocks
        inside = threading.local()

        def promised_and_not_kept(arena: KVArena, blocks: int) -> bool:
            """Whoever plans hears yes, and the step that follows is refused."""
            return real(arena, blocks) if not getattr(inside, "resize", False) else tuple(blocks) <= arena.blocks

        def resize(arena: KVArena, blocks: int) -> None:
            inside.resize = True
            try:
                resized(arena, blocks)
            finally:
                inside.resize = False

        resized = KVArena.resize
        monkeypatch.setattr(KVArena, "can_resize", promised_and_not_kept)
        monkeypatch.setattr(KVArena, "resize", resize)
        prompts = [tokens_of(480, seed=i) for i in range(8)]
        handles = [engine.submit(p, asked) for p in prompts]
        for text, handle in zip(prompts, handles, strict=True):
            assert list(handle.result(PATIENCE).token_ids) == theirs("llama", text, 5)
        prompt = tokens_of(40, seed=4)
        assert list(engine.generate(prompt, asked).token_ids) == theirs("llama", prompt, 5)
        engine.check_invariants()
        assert engine.stats().total_blocks == size
