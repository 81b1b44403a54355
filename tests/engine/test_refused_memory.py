"""Memory that the system refuses: the arena stays as it is, requests go on or fail with the numbers, and nothing
crashes. Each program limits its own address space.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.tiny import write_tiny

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is not enforced there")

HEAD = """
import json, resource, sys
from cortexmlx import CortexError, Engine, SamplingParams
from support.tiny import tokens_of

def leave(megabytes):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20,) * 2)

def outcome(handle):
    try:
        return len(handle.result(120).token_ids)
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
    lengths = [400] * 10 + [3000]
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
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, f"it ended with {done.returncode}: {done.stderr[-2000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_an_arena_that_may_not_grow_stays_and_every_request_has_an_end(tiny: Any, wide: Path) -> None:
    [[outcomes, before, after, limit, size]] = run(GROWING, wide, tiny("one layer"))
    assert outcomes[:10] == [12] * 10, "those that fit one after another are answered"
    assert outcomes[10].startswith("KVCacheFull: the prompt has 3000 tokens") and "2048" in outcomes[10]
    assert outcomes[11] == 12, "the engine goes on"
    assert outcomes[12].startswith("PromptTooLong: the prompt has 3000 tokens") and "2048" in outcomes[12]
    assert before == after == 64
    assert limit <= size


def test_a_first_arena_that_is_refused_is_an_error_with_the_numbers(tiny: Any, wide: Path) -> None:
    error, tokens = run(BEGINNING, wide, tiny("one layer"))
    assert error.startswith("MemoryRefused: the system refuses 264 MiB"), error
    assert tokens == 12, "a smaller one can be had"
