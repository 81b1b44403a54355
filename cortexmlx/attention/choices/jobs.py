"""The jobs of attention: which way computes the single tokens of a model's layers, in each class of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

import mlx.core as mx

from cortexmlx.attention.choices.batch_class import BatchClass, classes
from cortexmlx.attention.choices.decode import ChoosingBackend
from cortexmlx.attention.choices.layer import LayerAttention, LayerKey
from cortexmlx.attention.choices.problem import Slabs, TimedProblem, times_together
from cortexmlx.attention.choices.ways import Way, plain_ways
from cortexmlx.timed_choice.chooser import Chooser
from cortexmlx.timed_choice.job import Candidate, Job

AttentionJobs = dict[tuple[LayerKey, BatchClass], Job]
"""The jobs, by the layer and the class."""


def attention_jobs(
    layers: Mapping[LayerKey, LayerAttention], backend: ChoosingBackend, max_rows: int, longest: int
) -> AttentionJobs:
    """Return a job for each layer and each class of steps of up to `max_rows` rows and `longest` tokens, the usual
    classes first. Nothing is allocated before a job's candidates are prepared.
    """
    bench = _Bench(backend)
    found: AttentionJobs = {}
    for key, layer in layers.items():
        seen = longest if layer.window is None else min(longest, layer.window)
        for batch in classes(max_rows, seen):
            ways = (*backend.own_ways(layer), *plain_ways(layer, batch))
            sample = batch.sample(max_rows, seen)
            times = times_together(layer, *sample)
            candidates = tuple(
                Candidate(way.value, partial(bench.prepare, layer, batch, sample, way), times) for way in ways
            )
            name = f"{layer.label}; {batch.label}; {sample[0]} x {sample[1]}"
            found[key, batch] = Job(name, layer.label, batch.label, candidates)
    return found


def take_choices(backend: ChoosingBackend, jobs: AttentionJobs, chooser: Chooser) -> None:
    """Let a backend use what was chosen. Where that is the usual way, the rules choose it, and say so if they find
    that no kernel serves.
    """
    chosen = {key: chooser.chosen(job.key) for key, job in jobs.items()}
    others = {key: name for key, name in chosen.items() if name is not None and name != jobs[key].usual}
    backend.choices.take({key: Way(name) for key, name in others.items()})


def fixed_jobs(layers: Mapping[LayerKey, LayerAttention], backend: ChoosingBackend) -> list[Job]:
    """Return a job for each layer whose usual candidate serves all classes, for `Chooser.fix`."""
    return [
        Job(layer.label, layer.label, "every step", (Candidate(backend.fixed_way(layer).value, _not_timed),))
        for layer in layers.values()
    ]


def _not_timed() -> Callable[[], object]:
    raise AssertionError("a fixed choice is not timed")


class _Bench:
    """The problem that is being timed. It is made when its first candidate is prepared, and dropped for the next one,
    so that only one needs memory.
    """

    def __init__(self, backend: ChoosingBackend) -> None:
        self._backend = backend
        self._slabs = Slabs()
        self._job: tuple[LayerAttention, BatchClass] | None = None
        self._problem: TimedProblem | None = None
        self._checked: set[Way] = set()

    def prepare(
        self, layer: LayerAttention, batch: BatchClass, sample: tuple[int, int], way: Way
    ) -> Callable[[], object]:
        """Return a function that computes a problem by a way. Raises CannotServe, and what the way raises."""
        with _settled():
            problem = self._made(layer, batch, sample)
            attend = self._backend.attend_by(way, layer)
            if way not in self._checked:
                problem.check(attend)
                self._checked.add(way)
            run = problem.run(attend)

        def compute() -> None:
            with _settled():
                run()

        return compute

    def _made(self, layer: LayerAttention, batch: BatchClass, sample: tuple[int, int]) -> TimedProblem:
        if self._problem is None or self._job != (layer, batch):
            self._problem, self._checked = None, set()
            self._problem = TimedProblem(layer, batch, *sample, self._slabs)
            self._job = layer, batch
        return self._problem


@contextmanager
def _settled() -> Iterator[None]:
    """Wait for what is in flight if an exception leaves the context. A command buffer that failed is reported once more
    at the stream's next use: here, and not in a step.
    """
    try:
        yield
    except Exception:
        with suppress(Exception):
            mx.synchronize()
        raise
