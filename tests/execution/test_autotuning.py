"""What is timed when a model opens, when, and what happens if it cannot be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.attention.autotuning import TimedProblem
from cortexmlx.attention.backends import AttentionBackend
from cortexmlx.autotune.chooser import SECONDS
from cortexmlx.core.config import EngineConfig
from cortexmlx.core.in_process_model import InProcessModel
from cortexmlx.execution import autotuning
from cortexmlx.execution.autotuning import TIMING_VARIABLE, should_time
from cortexmlx.stats import ChoiceSource, TimedChoice
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of

Tiny = Callable[[str], Path]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cortexmlx" / "choices"


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing is switched on, on a CPU too."""
    monkeypatch.setenv(TIMING_VARIABLE, "1")


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What problems were made for timing."""
    made: list[Any] = []
    real = TimedProblem.__init__

    def noting(self: Any, *given: Any) -> None:
        made.append(given[1])
        real(self, *given)

    monkeypatch.setattr(TimedProblem, "__init__", noting)
    yield made


def sources(choices: tuple[TimedChoice, ...]) -> set[ChoiceSource]:
    """Of the jobs that have something to choose."""
    return {choice.source for choice in choices if choice.seconds or choice.source is not ChoiceSource.RULE}


def test_a_gpu_times_and_a_cpu_does_not_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    metal, plain = (
        AttentionBackend("metal", lambda *_, **__: mx.zeros(1)),
        AttentionBackend("reference", lambda *_, **__: mx.zeros(1)),
    )
    monkeypatch.delenv(TIMING_VARIABLE, raising=False)
    assert not should_time(metal) and not should_time(plain), "kernels are pretended on a CPU in tests"
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert should_time(metal) and not should_time(plain), "the reference is what was asked for"
    monkeypatch.setenv(TIMING_VARIABLE, "0")
    assert not should_time(metal)
    monkeypatch.setenv(TIMING_VARIABLE, "1")
    assert should_time(metal) and should_time(plain)


def test_on_a_cpu_nothing_is_looked_at(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, own_folder: Path) -> None:
    monkeypatch.delenv(TIMING_VARIABLE, raising=False)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("nothing is chosen on a CPU")

    monkeypatch.setattr("cortexmlx.core.in_process_model.choose_kernels", fail)
    assert Driver(tiny("llama")).core.stats().choices == ()
    assert not own_folder.exists()


def test_the_second_engine_takes_the_times_of_the_first(
    tiny: Tiny, on: None, problems: list[Any], own_folder: Path
) -> None:
    first = Driver(tiny("llama")).core.stats().choices
    assert sources(first) == {ChoiceSource.TIMED} and len(problems) == len(first) == 3
    assert len(list(own_folder.iterdir())) == 1
    again = Driver(tiny("llama")).core.stats().choices
    assert sources(again) == {ChoiceSource.DISK} and len(problems) == 3
    assert [(c.job, c.batch, c.chosen, c.seconds) for c in again] == [
        (c.job, c.batch, c.chosen, c.seconds) for c in first
    ]
    next(own_folder.iterdir()).write_text("damaged")
    assert sources(Driver(tiny("llama")).core.stats().choices) == {ChoiceSource.TIMED}


def test_all_is_timed_while_the_engine_opens_and_nothing_while_requests_are_there(
    tiny: Tiny, on: None, problems: list[Any]
) -> None:
    driver = Driver(tiny("llama"))
    timed = len(problems)
    driver.answers([tokens_of(20), tokens_of(30)], 20)
    driver.core.tidy()
    assert len(problems) == timed


def test_an_engine_that_somebody_waits_for_times_nothing(tiny: Tiny, on: None, problems: list[Any]) -> None:
    model = InProcessModel(EngineConfig(str(tiny("llama"))), lambda call: None, has_waiters=lambda: True)
    assert problems == [] and {choice.source for choice in model.choices} == {ChoiceSource.RULE}
    model.release()


def test_an_opening_asks_for_no_more_than_a_second_and_a_half(
    tiny: Tiny, on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = autotuning.Autotuner.choose

    def decide(self: Any, jobs: Any, **options: Any) -> None:
        asked.append(options["seconds"])
        real(self, jobs, **options)

    monkeypatch.setattr(autotuning.Autotuner, "choose", decide)
    Driver(tiny("llama"))
    assert asked == [SECONDS] == [1.5]


def test_timing_that_fails_leaves_the_rules_and_an_engine_that_works(
    tiny: Tiny, on: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a model that asks in a strange way")

    wanted = Driver(tiny("llama")).answers([tokens_of(20)], 8)
    monkeypatch.setattr(autotuning, "probe_layer_shapes", fail)
    with caplog.at_level(logging.WARNING):
        driver = Driver(tiny("llama"))
    assert driver.core.stats().choices == () and driver.answers([tokens_of(20)], 8) == wanted
    assert "the rules choose what computes attention" in caplog.text and "a strange way" in caplog.text


def test_a_model_on_mlx_lms_own_caches_has_nothing_to_choose(tiny: Tiny, on: None, unpaged: None) -> None:
    assert Driver(tiny("llama")).core.stats().choices == ()


def test_an_interrupt_while_timing_ends_the_opening_and_frees_the_model(
    tiny: Tiny, on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any, *_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TimedProblem, "require_agreement", interrupted)
    with pytest.raises(KeyboardInterrupt):
        InProcessModel(EngineConfig(str(tiny("llama"))), lambda call: None)


def test_a_reproducible_engine_fixes_one_way_and_times_nothing(
    tiny: Tiny, on: None, problems: list[Any], own_folder: Path
) -> None:
    [choice] = Driver(tiny("llama"), reproducible=True).core.stats().choices
    assert (choice.batch, choice.chosen, choice.source) == ("every step", "row by row", ChoiceSource.FIXED)
    assert problems == [] and not own_folder.exists()
    [choice] = Driver(tiny("llama"), reproducible=True, attention="sim").core.stats().choices
    assert choice.chosen == "vector kernel"
