"""A store that engines share while they are killed: whoever comes next answers as if there was none."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.models.tiny import tokens_of
from support.patience import PATIENCE
from support.store.stored import Stored

ANSWERING = """
import sys
sys.path[:0] = [sys.argv[3]]
from pathlib import Path
from cortexmlx import Engine, SamplingParams
from support.models.tiny import tokens_of
store = {"kv_store": sys.argv[2], "kv_store_bytes": "200KB"}
with Engine(sys.argv[1], kv_memory="128KB", block_size=8, max_rows=4, **store) as engine:
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    for turn in range(10_000):
        prompts = [tokens_of(90, seed=s) for s in range(turn % 3, 8, 3)]
        for prompt, done in zip(prompts, engine.generate_batch(prompts, params)):
            print(prompt[:3], list(done.token_ids), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 12])
def test_two_engines_share_a_store_and_both_are_killed(
    rounds: int, tiny: Any, theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they said until then is right, too."""
    monkeypatch.setattr("cortexmlx.disk.tier._READING_SECONDS", -1e9)  # reading pays, however busy the disk is
    chance = random.Random(rounds)
    tests = str(Path(__file__).resolve().parents[1])
    prompts = [tokens_of(90, seed=s) for s in range(8)]
    right = {f"{prompt[:3]} {theirs('llama', prompt, 10)}" for prompt in prompts}
    for _ in range(rounds):
        command = [sys.executable, "-c", ANSWERING, str(tiny("llama")), str(tmp_path), tests]
        engines = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
        said = [engine.stdout.readline() for engine in engines if engine.stdout is not None]
        until = time.monotonic() + PATIENCE
        while not list(tmp_path.glob("*.safetensors")) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(chance.uniform(0.0, 0.5))
        for engine in engines:
            engine.send_signal(signal.SIGKILL)
            said += engine.communicate()[0].splitlines(keepends=True)
        assert {line.strip() for line in said if line.endswith("\n")} <= right and len(said) > 2
        with Stored(tiny("llama"), tmp_path) as driver:
            found = 0
            for prompt in prompts:
                answer, cached = driver.ask(prompt)
                assert answer == theirs("llama", prompt, 10)
                found += cached
            assert found > 0, "some of it was on disk"
