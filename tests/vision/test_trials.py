"""Random requests with images and without, in random engines, get the answers of an engine that has nothing else to do.

`python -m tests.trials.speculation --only "qwen3_5 images"` runs more of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine
from support.adapters.kinds import Adapted, adapters_of, content
from support.engine.core_driver import Driver
from support.models.adapters import write_adapter
from support.models.sighted import picture, show, shown, write_sighted
from support.patience import PATIENCE
from support.speculation.counts import Counts
from support.speculation.sighted_trial import SightedAdaptedTrial, SightedMixedTrial, SightedTalkTrial, sighted_kind

pytest.importorskip("PIL")
TRIALS = (
    (SightedMixedTrial, "qwen3_vl"),
    (SightedTalkTrial, "qwen3_5 head"),
    (SightedMixedTrial, "gemma3"),
    pytest.param(SightedMixedTrial, "gemma4 large 8 bits", marks=pytest.mark.slow),
    (SightedTalkTrial, "mistral3 8 bits"),
)


@pytest.mark.parametrize(("trial", "name"), TRIALS)
def test_answers_are_those_of_a_request_alone(trial: type[SightedMixedTrial], name: str, tmp_path: Path) -> None:
    kind, counts = sighted_kind(tmp_path, name), Counts()
    trial(2, kind, 8, tmp_path / "store").run(counts)
    assert counts.asked["images"] > 4 and counts.accepted > 10


@pytest.mark.parametrize(
    "name", ["mistral3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "gemma4 small"))]
)
def test_answers_with_adapters_are_those_of_a_request_alone(name: str, tmp_path: Path) -> None:
    kind, counts = sighted_kind(tmp_path, name), Counts()
    adapters = adapters_of(tmp_path / "adapters", kind.folder)
    SightedAdaptedTrial(7, Adapted(kind, adapters), 8, tmp_path / "store").run(counts)
    assert counts.asked["images"] > 4


def test_a_request_keeps_its_adapter_while_its_images_are_looked_at(tmp_path: Path) -> None:
    model = write_sighted(tmp_path / "model", "qwen3_vl")
    adapters = [content(write_adapter(tmp_path / str(seed), model, seed=seed, scale=8.0)) for seed in (0, 1)]

    def answer(then: str) -> tuple[int, ...]:
        driver = Driver(model)
        core, prompt = driver.core, [*show(driver)[-1], 7]
        core.adapters.load("sql", adapters[0], core.scheduler.jobs)
        handle = driver.add(prompt, 8, adapter="sql")
        if then == "replaced":
            core.adapters.load("sql", adapters[1], core.scheduler.jobs)
        elif then == "unloaded":
            core.adapters.unload("sql", core.scheduler.jobs)
        driver.finish()
        assert core.adapters.loaded_count == (then != "unloaded")
        return driver.result(handle).token_ids

    assert answer("kept") == answer("replaced") == answer("unloaded")


ASKING = """
import os, sys, time
sys.path[:0] = [sys.argv[1]]
from cortexmlx import Engine
from support.models.sighted import picture, shown
engines = []
for folder in sys.argv[2:]:
    engines.append(Engine(folder, kv_store=folder + "/store", block_size=8, kv_bits=8, speculate=False))
    done = engines[-1].generate([shown("s" * 20, picture(64, 64, 3))], max_tokens=12, temperature=0, ignore_eos=True)
    while engines[-1].stats().kv_store.stored_blocks < (done.usage.prompt_tokens + 12) // 8 - 1:
        time.sleep(0.05)
    print(done.text.encode(), done.usage.prompt_tokens, list(done.token_ids), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    "names",
    [("gemma4 small", "mistral3"), pytest.param(("gemma4 large", "gemma3", "qwen3_vl"), marks=pytest.mark.slow)],
)
def test_a_second_question_computes_its_own_tokens_after_kill_9_with_packed_keys(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    folders = [str(sighted_kind(tmp_path, f"{name} 8 bits").folder) for name in names]
    command = [sys.executable, "-c", ASKING, str(Path(__file__).parents[1]), *folders]
    killed = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert killed.returncode == -9
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    for folder, line in zip(folders, killed.stdout.splitlines(), strict=True):
        first = [shown("s" * 20, picture(64, 64, 3))]
        options: dict[str, Any] = {"block_size": 8, "kv_bits": 8, "speculate": False}
        with Engine(folder, **options, prefix_cache=False) as engine:
            plain = engine.generate(first, **asked)
            assert line == f"{plain.text.encode()} {plain.usage.prompt_tokens} {list(plain.token_ids)}"
            more = [{"role": "assistant", "content": "it is"}, {"role": "user", "content": "and now?"}]
            second = engine.generate([*first, *more], **asked)
        with Engine(folder, kv_store=f"{folder}/store", **options) as engine:
            again = engine.generate([*first, *more], **asked)
            new = second.usage.prompt_tokens - plain.usage.prompt_tokens
            computed = again.usage.prompt_tokens - again.usage.cached_tokens
            assert again.token_ids == second.token_ids and computed <= new + 2 * 8
            other = engine.generate([shown("s" * 20, picture(64, 64, 4))], **asked).usage
            assert other.cached_tokens < 40 < again.usage.cached_tokens, "another image of its size is another text"
