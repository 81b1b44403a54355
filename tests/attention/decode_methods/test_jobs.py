"""The jobs of attention, and the choices that follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.attention import autotuning
from cortexmlx.attention.autotuning import TimedArena, apply_chosen_methods, attention_jobs, reproducible_jobs
from cortexmlx.attention.decode_methods import BatchClass, DecodeMethod, LayerAttention, ReferenceAttention
from cortexmlx.attention.paged import Attend
from cortexmlx.autotune.chooser import Autotuner
from cortexmlx.errors import MemoryRefused
from cortexmlx.kv.spec import KVSpec
from cortexmlx.stats import ChoiceSource
from support.scripted_choice import Clock

LAYER = LayerAttention("float32", 4, KVSpec(2, 8, 8, "float32"), 8, 0.35, None, None, False, None)


class Scripted(ReferenceAttention):
    """The reference backend with kernels that do not exist: a method advances the clock by its seconds when its result
    is computed, and one that is broken gives something else.
    """

    def __init__(self, clock: Clock, seconds: dict[DecodeMethod, float], broken: tuple[DecodeMethod, ...] = ()) -> None:
        super().__init__()
        self.clock, self.seconds, self.broken = clock, seconds, broken
        self.attended: list[DecodeMethod] = []

    def kernel_methods(self, layer: LayerAttention) -> tuple[DecodeMethod, ...]:
        return tuple(method for method in (DecodeMethod.VECTOR, DecodeMethod.MATRIX) if method in self.seconds)

    def attend_with(self, method: DecodeMethod, layer: LayerAttention) -> Attend:
        real = super().attend_with(DecodeMethod.REFERENCE if method in self.kernel_methods(layer) else method, layer)

        def attend(*given: Any) -> mx.array:
            self.attended.append(method)
            self.clock.now += self.seconds[method]
            return real(*given) * (0.0 if method in self.broken else 1.0)

        return attend


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that a method moves when it is computed, not when it is prepared."""
    clock = Clock()
    real = autotuning.TimedProblem.build_run

    def run(self: Any, attend: Attend) -> Callable[[], None]:
        return lambda: real(self, attend)()

    monkeypatch.setattr(autotuning.TimedProblem, "build_run", run)
    return clock


def decided(backend: Scripted, **more: Any) -> Autotuner:
    jobs = attention_jobs({"layer": LAYER}, backend, 4, 100)
    chooser = Autotuner(None, backend.clock)
    chooser.choose(jobs.values(), seconds=1e6)
    apply_chosen_methods(backend, jobs, chooser)
    return chooser


def test_the_fastest_way_serves_its_class(clock: Clock) -> None:
    """A kernel that spills costs nobody anything."""
    times = {
        DecodeMethod.VECTOR: 1.0,
        DecodeMethod.MATRIX: 0.75,
        DecodeMethod.REFERENCE: 0.5,
        DecodeMethod.VIEW: 0.25,
        DecodeMethod.GATHER: 2.0,
    }
    backend = Scripted(clock, times)
    chooser = decided(backend)
    assert [(choice.batch, choice.chosen) for choice in chooser.choices()] == [
        ("1 row in one run, up to 512 tokens", "MLX over the view"),
        ("2 to 4 rows, up to 512 tokens", "reference path"),
        ("1 row in pieces, up to 512 tokens", "reference path"),
    ]
    assert backend.choices._methods == {
        ("layer", BatchClass(1, 512, True)): DecodeMethod.VIEW,
        ("layer", BatchClass(4, 512)): DecodeMethod.REFERENCE,
        ("layer", BatchClass(1, 512)): DecodeMethod.REFERENCE,
    }


def test_the_rules_choose_where_the_usual_way_is_the_fastest(clock: Clock) -> None:
    """They say why a shape has no kernel, and a choice would not."""
    times = {
        DecodeMethod.VECTOR: 0.5,
        DecodeMethod.MATRIX: 0.75,
        DecodeMethod.REFERENCE: 1.0,
        DecodeMethod.VIEW: 2.0,
        DecodeMethod.GATHER: 2.0,
    }
    backend = Scripted(clock, times)
    assert {choice.chosen for choice in decided(backend).choices()} == {"vector kernel"}
    assert backend.choices._methods == {}


def test_a_way_with_another_result_cannot_serve_however_fast(clock: Clock) -> None:
    times = {
        DecodeMethod.VECTOR: 1.0,
        DecodeMethod.MATRIX: 0.001,
        DecodeMethod.REFERENCE: 2.0,
        DecodeMethod.VIEW: 0.001,
        DecodeMethod.GATHER: 3.0,
    }
    chooser = decided(Scripted(clock, times, broken=(DecodeMethod.MATRIX, DecodeMethod.VIEW)))
    assert {choice.chosen for choice in chooser.choices()} == {"vector kernel"}
    first = chooser.choices()[0]
    assert set(first.refused) == {"matrix kernel", "MLX over the view"}
    assert all("differs by 1 of the largest number" in why for why in first.refused.values())


def test_nothing_is_allocated_for_a_job_that_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing is timed")

    monkeypatch.setattr(TimedArena, "arena_for", refuse)
    jobs = attention_jobs({"layer": LAYER}, ReferenceAttention(), 4, 100)
    chooser = Autotuner(None)
    chooser.choose(jobs.values(), runs=0)
    assert {choice.source for choice in chooser.choices()} == {ChoiceSource.RULE}


def test_refused_memory_leaves_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryRefused("the system refuses 64 MB for the KV cache")

    monkeypatch.setattr(TimedArena, "arena_for", refuse)
    backend = ReferenceAttention()
    jobs = attention_jobs({"layer": LAYER}, backend, 4, 100)
    chooser = Autotuner(None)
    chooser.choose(jobs.values())
    assert {choice.chosen for choice in chooser.choices()} == {"reference path"}
    assert "refuses 64 MB" in chooser.choices()[0].refused["MLX over the view"]


def test_a_windows_layers_have_the_classes_that_they_can_see() -> None:
    layers = {"all": LAYER, "window": replace(LAYER, window=100)}
    jobs = attention_jobs(layers, ReferenceAttention(), 1, 3000)
    assert {key: batch.tokens for key, batch in jobs if batch.run} == {"all": 4096, "window": 512}
    assert len({job.key for job in jobs.values()}) == len(jobs)


def test_a_fixed_choice_is_not_timed() -> None:
    [job] = reproducible_jobs({"layer": LAYER}, ReferenceAttention())
    chooser = Autotuner(None)
    chooser.choose_default(job)
    [choice] = chooser.choices()
    assert (choice.batch, choice.chosen, choice.source) == ("every step", "row by row", ChoiceSource.FIXED)


def test_an_error_of_a_way_does_not_stay_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU reports a command buffer that failed once more at the stream's next use."""
    waited = []
    monkeypatch.setattr(mx, "synchronize", lambda: waited.append(True))
    backend = ReferenceAttention()

    def failing(method: DecodeMethod, layer: LayerAttention) -> Attend:
        if method is DecodeMethod.VIEW:
            raise RuntimeError("[METAL] Command buffer execution failed")
        return ReferenceAttention.attend_with(backend, method, layer)

    monkeypatch.setattr(backend, "attend_with", failing)
    jobs = attention_jobs({"layer": LAYER}, backend, 1, 100)
    chooser = Autotuner(None)
    chooser.choose([jobs["layer", BatchClass(1, 512, True)]])
    assert waited == [True]
    assert "Command buffer" in chooser.choices()[0].refused["MLX over the view"]
