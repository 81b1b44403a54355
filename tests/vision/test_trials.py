"""Random requests with images and without, in random engines, get the answers of an engine that has nothing else to do.

`python -m tests.trials.speculation --only "qwen3_5 images"` runs more of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.adapters.kinds import content
from support.engine.core_driver import Driver
from support.models.adapters import write_adapter
from support.models.draft_heads import write_draft_head
from support.models.sighted import add_sight, show, write_sighted
from support.models.sighted_gemma import write_sighted_gemma
from support.speculation.counts import Counts
from support.speculation.kinds import Kind
from support.speculation.sighted_trial import SightedMixedTrial, SightedTalkTrial

pytest.importorskip("PIL")
TRIALS = ((SightedMixedTrial, "qwen3_vl"), (SightedTalkTrial, "qwen3_5 head"), (SightedMixedTrial, "gemma3"))


@pytest.mark.parametrize(("trial", "name"), TRIALS)
def test_answers_are_those_of_a_request_alone(trial: type[SightedMixedTrial], name: str, tmp_path: Path) -> None:
    folder, counts = tmp_path / "model", Counts()
    if "head" in name:
        write_draft_head(folder, "qwen3_5")
        add_sight(folder, "qwen3_5")
    elif "gemma" in name:
        write_sighted_gemma(folder, name)
    else:
        write_sighted(folder, name)
    trial(7, Kind(name, folder), 12, tmp_path / "store").run(counts)
    print(counts)
    assert counts.asked["images"] > 4 and counts.accepted > 10


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
