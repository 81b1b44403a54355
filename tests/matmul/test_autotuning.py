"""Which matmuls our kernel computes: the classes of rows, what is timed for them, and what follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.switch_layers import SwitchLinear

from cortexmlx.autotune.chooser import SECONDS, Autotuner
from cortexmlx.autotune.job import Candidate, CannotServe, TuningJob
from cortexmlx.autotune.table import ChoiceTable, TimingIdentity
from cortexmlx.matmul.autotuning import (
    MLX,
    OURS,
    PAIRS,
    ROWS,
    MatmulChoices,
    RowClass,
    matmul_jobs,
    mlx_row_limit,
    row_classes,
)
from cortexmlx.matmul.served import QuantizedMatmuls
from cortexmlx.metal.lab import sim
from cortexmlx.metal.matmul.shape import MatmulShape, split_rows
from cortexmlx.stats import ChoiceSource

SHAPE = MatmulShape("float32", "affine", 4, 32, 64, 48)
OF_EXPERTS = MatmulShape("float32", "affine", 4, 32, 64, 32, experts=5)


class Model(nn.Module):  # type: ignore[misc]
    """Two matmuls of one shape, a tied head, and experts."""

    def __init__(self, mode: str = "affine") -> None:
        super().__init__()
        mx.random.seed(3)
        self.layers = [nn.Linear(64, 48, bias=False) for _ in range(2)]
        self.embedding = nn.Embedding(40, 64)
        self.switch = SwitchLinear(64, 32, 5, bias=False)
        nn.quantize(self, 32, 4, mode=mode)
        mx.eval(self.parameters())


def served_by(use: Any, model: Model) -> QuantizedMatmuls:
    served = QuantizedMatmuls(sim.metal_kernel, use, check=False)
    served.install(model)
    return served


ARCHITECTURES = [None, (13, "g"), (13, "d"), (14, "s"), (16, "s"), (17, "g"), (17, "d"), (11, "p")]


@given(
    architecture=st.sampled_from(ARCHITECTURES),
    inputs=st.sampled_from([1024, 2048, 4096, 12288]),
    experts=st.sampled_from([None, 8, 32, 128]),
)
def test_a_class_of_rows_is_one_variant_of_ours_and_one_kernel_of_mlxs(
    architecture: tuple[int, str] | None, inputs: int, experts: int | None
) -> None:
    shape = MatmulShape("float16", "affine", 4, 64, inputs, 1024, experts)
    limit = mlx_row_limit(shape, architecture)
    classes = row_classes(shape, limit)
    last = (ROWS if experts is None else PAIRS)[-1]
    assert [rows for each in classes for rows in range(each.min_rows, each.max_rows + 1)] == list(range(2, last + 1))
    for low, high in classes:
        assert limit is None or (low < limit) == (high < limit)
        assert experts is not None or split_rows(low) == split_rows(high)


def test_nothing_is_ours_until_it_is_chosen() -> None:
    choices = MatmulChoices()
    assert not any(choices(SHAPE, rows) for rows in range(40))
    choices.set_classes([(SHAPE, RowClass(9, 16)), (OF_EXPERTS, RowClass(9, 32))])
    assert [rows for rows in range(40) if choices(SHAPE, rows)] == list(range(9, 17))
    assert [rows for rows in range(40) if choices(OF_EXPERTS, rows)] == list(range(9, 33))
    choices.set_classes([])
    assert not choices(SHAPE, 9)


def test_there_is_a_job_for_each_shape_and_class_that_steps_can_have() -> None:
    """A lone request's verifying steps have several rows, too."""
    model = Model()
    served = served_by(MatmulChoices(), model)
    jobs = matmul_jobs(served, "float32", None)
    head = MatmulShape("float32", "affine", 4, 32, 64, 40)
    assert {(shape, rows.max_rows) for shape, rows in jobs} == {
        *((shape, most) for shape in (SHAPE, head) for most in ROWS),
        *((OF_EXPERTS, most) for most in PAIRS),
    }
    assert len({job.key for job in jobs.values()}) == len(jobs)
    job = jobs[SHAPE, RowClass(9, 16)]
    assert (
        job.batch == "9 to 16 rows"
        and [each.name for each in job.candidates] == [MLX, OURS]
        and job.default_candidate == MLX
    )
    assert [each.times for each in job.candidates] == [2, 2]


def test_scales_that_say_nothing_of_the_rows_take_the_models_dtype() -> None:
    served = served_by(MatmulChoices(), Model("mxfp4"))
    assert {shape.dtype for shape, _ in matmul_jobs(served, "bfloat16", None)} == {"bfloat16"}
    assert not matmul_jobs(served_by(MatmulChoices(), Model()), "float16", None), "affine scales are float32 here"


@pytest.mark.parametrize(
    "key",
    [
        (SHAPE, RowClass(5, 8)),
        (MatmulShape("float32", "affine", 4, 32, 64, 40), RowClass(5, 8)),
        (OF_EXPERTS, RowClass(2, 8)),
        (OF_EXPERTS, RowClass(129, 512)),  # sorted
    ],
)
def test_both_candidates_compute_the_same_matmuls(key: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is evaluated in a run is compared."""
    served = served_by(MatmulChoices(), Model())
    job = matmul_jobs(served, "float32", None)[key]
    results: list[list[Any]] = []
    real = mx.eval

    def noting(*made: Any) -> None:
        real(*made)
        if isinstance(made[0], list):
            results.append([np.array(each) for each in made[0]])

    for candidate in job.candidates:
        run = candidate.prepare()
        with monkeypatch.context() as patched:
            patched.setattr(mx, "eval", noting)
            run()
    results = [made for made in results if made[0].shape[-1] == key[0].outputs]
    theirs, ours = results
    assert len(theirs) == len(ours) == job.candidates[0].times
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.size == other.size and np.allclose(mine.ravel(), other.ravel(), rtol=1e-4, atol=1e-4)


def test_a_kernel_that_disagrees_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    served = served_by(MatmulChoices(), Model())
    monkeypatch.setattr(served, "approves", lambda shape, rows: False)
    _, ours = matmul_jobs(served, "float32", None)[SHAPE, RowClass(5, 8)].candidates
    with pytest.raises(CannotServe, match="disagrees"):
        ours.prepare()


# Macs by a scripted clock: the sizes of Qwen3-8B in 4 bits, and how long each kernel would take there.


@dataclass
class ScriptedGpu:
    """A GPU on which a matmul takes as long as its weights need to be read, times a factor of the rows."""

    architecture: tuple[int, str]
    bandwidth: float
    mlx_row: float
    """Of the time that a single row takes: what MLX takes for each row below its limit, if that is more."""
    mlx_matrix: float
    """What MLX takes for many rows."""
    tile: tuple[float, float, float]
    """What our kernel takes for one, two and three tiles of rows."""
    compile_seconds: float = 0.12
    error: Exception | None = None
    now: float = 0.0
    log: list[tuple[MatmulShape, RowClass]] = field(default_factory=list)
    compiled: set[object] = field(default_factory=set)

    def jobs(self) -> dict[tuple[MatmulShape, RowClass], TuningJob]:
        """The jobs of the model, with scripted candidates."""
        shapes = {(4096, 4096): 72, (4096, 1024): 72, (4096, 12288): 72, (12288, 4096): 36, (4096, 151936): 1}
        modules = {
            MatmulShape("bfloat16", "affine", 4, 64, *dims): [nn.Module()] * count for dims, count in shapes.items()
        }
        matmuls = cast(QuantizedMatmuls, SimpleNamespace(modules=lambda dtype: modules))
        return {
            key: replace(job, candidates=tuple(self._scripted(key, candidate) for candidate in job.candidates))
            for key, job in matmul_jobs(matmuls, "bfloat16", self.architecture).items()
        }

    def _scripted(self, key: tuple[MatmulShape, RowClass], candidate: Candidate) -> Candidate:
        shape, rows = key
        limit = mlx_row_limit(shape, self.architecture)
        assert limit is not None
        seconds = shape.weight_bytes / self.bandwidth
        if candidate.name == OURS:
            seconds *= self.tile[split_rows(rows.min_rows).tiles - 1]
        else:
            seconds *= max(1.0, self.mlx_row * rows.min_rows) if rows.min_rows < limit else self.mlx_matrix

        def prepare() -> Callable[[], object]:
            variant = candidate.name, split_rows(rows.min_rows)
            if variant not in self.compiled and candidate.name == OURS:
                self.now += self.compile_seconds
                self.compiled.add(variant)
            if self.error is not None and candidate.name == OURS:
                raise self.error
            if not self.log or self.log[-1] != key:
                self.log.append(key)
            return compute

        def compute() -> None:
            self.now += 0.0002 + seconds * candidate.times

        return replace(candidate, prepare=prepare)


M1 = ScriptedGpu((13, "g"), 68e9, 0.43, 2.6, (1.1, 1.9, 2.8))
M4_MAX = ScriptedGpu((16, "s"), 546e9, 0.35, 4.6, (1.25, 2.5, 3.7))
M5 = ScriptedGpu((17, "g"), 153e9, 0.3, 1.25, (1.15, 1.8, 2.6))
M5_WITHOUT_NAX = replace(M5, mlx_matrix=3.4)


def choose(gpu: ScriptedGpu, table: ChoiceTable | None = None) -> tuple[Autotuner, list[tuple[MatmulShape, RowClass]]]:
    """One opening: the chooser, and the classes for which our kernel serves."""
    chooser, jobs = Autotuner(table, clock=lambda: gpu.now), gpu.jobs()
    chooser.choose(jobs.values())
    return chooser, [key for key, job in jobs.items() if chooser.chosen_candidate(job.key) == OURS]


def row_counts(ours: list[tuple[MatmulShape, RowClass]], outputs: int) -> set[int]:
    return {n for shape, rows in ours if shape.outputs == outputs for n in range(rows.min_rows, rows.max_rows + 1)}


@pytest.mark.parametrize(
    ("gpu", "gate_rows", "openings"),
    [
        (M1, {*range(3, 17)}, 2),
        (M4_MAX, {*range(5, 25)}, 1),
        (M5, {*range(5, 13)}, 1),
        (M5_WITHOUT_NAX, {*range(5, 25)}, 1),
    ],
    ids=["M1", "M4 Max", "M5", "M5 without NAX"],
)
def test_what_serves_on_a_mac_and_how_soon(
    gpu: ScriptedGpu, gate_rows: set[int], openings: int, tmp_path: Path
) -> None:
    table = ChoiceTable(TimingIdentity("GPU", "25", "0.32", "texts", "0"), tmp_path)
    gpu = replace(gpu, log=[], compiled=set())
    for opening in range(1, openings + 1):
        opened = gpu.now
        chooser, ours = choose(gpu, table)
        assert gpu.now - opened <= SECONDS
        untimed = [choice for choice in chooser.choices() if choice.source is ChoiceSource.RULE]
        assert bool(untimed) == (opening < openings), len(untimed)
        assert all(choice.chosen == MLX for choice in untimed)
        gpu.compiled.clear()
    assert row_counts(ours, 12288) == gate_rows
    for shape, rows in gpu.log[:2]:  # what gains most comes first: the widest rows below MLX's limit
        limit = mlx_row_limit(shape, gpu.architecture)
        assert limit is not None and rows.max_rows >= min(limit - 1, ROWS[-1])


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (replace(M4_MAX, error=RuntimeError("program_source:3: error")), "RuntimeError: program_source:3: error"),
        (replace(M4_MAX, error=CannotServe("it disagrees with float64")), "it disagrees with float64"),
        (replace(M4_MAX, tile=(20.0, 20.0, 20.0)), None),
    ],
    ids=["does not compile", "wrong", "slow"],
)
def test_a_kernel_that_fails_leaves_everything_to_mlx(gpu: ScriptedGpu, reason: str | None) -> None:
    gpu = replace(gpu, log=[], compiled=set())
    chooser, ours = choose(gpu)
    assert ours == [] and {choice.chosen for choice in chooser.choices()} == {MLX}
    if reason is not None:
        assert {reason} == {text for choice in chooser.choices() for text in choice.refused.values()}
