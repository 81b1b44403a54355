"""Every model type that mlx-lm has computes what mlx-lm computes, or is refused for the reason that the page gives; and
the checks that say so notice what is wrong.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.scheduling.plan import StepKind
from support.engine.core_driver import Driver
from tests.architectures.configurations import TYPES, configuration, remapped
from tests.architectures.outcomes import Status, outcome, read_results
from tests.architectures.parity import CHECKS, SIMULATED, STEPS, TOLERANCE, Subject, Wrong, ragged, subject

TELLING = (
    "llama",
    "gemma2",
    "gemma3n",
    "gpt_oss",
    "mimo_v2_flash",
    "llama4",
    "deepseek_v3",
    "falcon_h1",
    "qwen3_next",
    "rwkv7",
)
"""Few that have every way to keep and to attend: windows, soft caps, layers that read what others keep, sinks, values
narrower than keys, chunks, latents, two caches in a layer, states beside attention and alone.
"""

Made = Callable[[str], Subject]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A function from a type to its model and judge."""
    subjects: dict[str, Subject] = {}

    def make(name: str) -> Subject:
        if name not in subjects:
            subjects[name] = subject(name, tmp_path_factory.mktemp("architecture") / name)
        return subjects[name]

    return make


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Without `mx.compile`, which on a CPU runs a compiler for each shape of a step."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.parametrize("name", TELLING)
def test_ragged_rows_have_mlx_lms_logits(name: str, made: Made, uncompiled: None) -> None:
    assert ragged(made(name)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TYPES, *remapped()])
def test_a_type_is_served_or_refused_as_the_page_says(name: str, tmp_path: Path) -> None:
    kind = remapped().get(name, name)
    wanted, found = read_results()[kind], outcome(name, tmp_path / "model")
    assert found.status is not Status.WRONG, found.why
    if name == kind:
        assert found == wanted, "`python -m tests.architectures --write` takes down what is found now"
    else:
        assert (found.status, found.kept, found.checks) == (wanted.status, wanted.kept, wanted.checks)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATED)
def test_ragged_rows_have_mlx_lms_logits_in_the_simulator(
    name: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers: list[Driver] = []
    right = Subject.driver

    def kept(self: Subject, **config: Any) -> Driver:
        drivers.append(right(self, **config))
        return drivers[-1]

    monkeypatch.setattr(Subject, "driver", kept)
    assert ragged(made(name), attention="sim") <= TOLERANCE
    backend = drivers[0].core.backend
    assert {"vector", "matrix", "wide"} & set(backend.kernels()), backend.describe()


def test_the_batch_has_steps_of_pieces_and_decoding_rows(made: Made) -> None:
    driver = made("llama").driver()
    dispatch, steps = driver.core.runner.dispatch, []

    def watched(plan: Any) -> Any:
        steps.append({"piece" if s.count > 1 else "token" for s in plan.segments})
        return dispatch(plan)

    driver.core.runner.dispatch = watched
    for prompt in made("llama").prompts:
        driver.add(prompt, STEPS)
        driver.step(2)
    driver.finish()
    assert steps.count({"piece", "token"}) >= 3


# -- what the checks notice -------------------------------------------------------------------------------------------


def shifted(driver: Driver) -> None:
    """Answers' tokens are at a position one too far."""
    dispatch = driver.core.runner.dispatch

    def wrong(plan: Any) -> Any:
        if plan.kind is StepKind.DECODE:
            plan = replace(plan, positions=plan.positions + 1)
        return dispatch(plan)

    driver.core.runner.dispatch = wrong


def swapped(driver: Driver) -> None:
    """The first two rows of a step get each other's attention."""
    attend = driver.core.runner._attend

    def wrong(*inputs: Any, **others: Any) -> mx.array:
        out = attend(*inputs, **others)
        return out if out.shape[0] < 2 else mx.concatenate([out[1:2], out[:1], out[2:]])

    driver.core.runner._attend = wrong


def unflushed(driver: Driver) -> None:
    """What a decode window wrote is lost at its end."""
    driver.core.runner.memory.flush = lambda _: driver.core.runner.memory.tail.clear()


def uncopied(driver: Driver) -> None:
    """Who begins within another's block finds nothing there."""
    dispatch = driver.core.runner.dispatch
    driver.core.runner.dispatch = lambda plan: dispatch(replace(plan, copies=()))


FAULTS = {
    "position off by one": (shifted, "batch"),
    "rows swapped": (swapped, "batch"),
    "a flush lost": (unflushed, "batch"),
    "a copy lost for a prefix": (uncopied, "prefix"),
    "a copy lost for a fork": (uncopied, "fork"),
    "rows swapped in a tight arena": (swapped, "preempt"),
}


FAST = (("llama", "position off by one"), ("llama", "rows swapped"))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, marks=() if (name, fault) in FAST else pytest.mark.slow)
        for name in ("llama", "gpt_oss", "mimo_v2_flash", "gemma2")
        for fault in FAULTS
    ],
)
def test_a_fault_in_the_engine_is_noticed(name: str, fault: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = FAULTS[fault]
    one, right = made(name), Subject.driver

    def faulty(self: Subject, *inputs: Any, **others: Any) -> Driver:
        driver = right(self, *inputs, **others)
        plant(driver)
        return driver

    monkeypatch.setattr(Subject, "driver", faulty)
    with pytest.raises(Wrong):
        CHECKS[check](one)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", [1, -1])
def test_a_window_off_by_one_is_noticed(name: str, change: int, made: Made, tmp_path: Path) -> None:
    """The engine's model has the window of another configuration than the judge's."""
    one = made(name)
    folder = Path(shutil.copytree(one.folder, tmp_path / name))
    config = configuration(name)
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": config["sliding_window"] + change}))
    with pytest.raises(Wrong):
        ragged(replace(one, folder=folder))


def test_a_type_that_only_a_newer_mlx_lm_has_is_tried_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No list of ours refuses it, and one that cannot be built says which numbers it lacks."""
    import mlx_lm.models

    monkeypatch.setattr(mlx_lm.models, "__path__", [*mlx_lm.models.__path__, str(tmp_path / "newer")])
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "made_type.py").write_text("from mlx_lm.models.qwen3 import Model, ModelArgs\n")
    (tmp_path / "newer" / "made_other.py").write_text(
        "from dataclasses import dataclass\nfrom mlx_lm.models.base import BaseModelArgs\nModel = None\n"
        "@dataclass\nclass ModelArgs(BaseModelArgs):\n    number_of_its_own: int\n"
    )
    assert "made_type" not in TYPES
    found = outcome("made_type", tmp_path / "model")
    assert found.status is Status.SERVED and found.kept == ("2 × all tokens",)
    lacking = outcome("made_other", tmp_path / "other")
    assert lacking.status is Status.UNJUDGED and "number_of_its_own" in lacking.why
