"""Autotuning of quantized matmuls: our kernel computes those for which it was the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from cortexmlx.autotune.job import Candidate, CannotServe, TuningJob
from cortexmlx.matmul.served import QuantizedMatmuls
from cortexmlx.metal.matmul.shape import MAX_TILES, TILE, MatmulShape

MLX, OURS = "MLX", "quantized_matmul kernel"

ROWS = (2, 4, *(TILE * tiles for tiles in range(1, MAX_TILES + 1)))
"""The most rows of each class. MLX's own limit divides a class, too (`row_classes`). A single row is MLX's: nothing is
shared.
"""

PAIRS = (8, 32, 128, 512)
"""The most pairs of a token and an expert of each class."""

SORTED_PAIRS = 64
"""From so many pairs on, mlx-lm sorts them by their experts."""

MAX_RUN_MODULES, RUN_BYTES = 8, 128 << 20
"""Matmuls of a run, each with other weights, so that the weights come from memory as in a step: so many, and more
bytes than the caches of a GPU hold, but no more of them.
"""


class RowClass(NamedTuple):
    """The matmuls of `min_rows` to `max_rows` rows (or token-expert pairs), for which one choice is made."""

    min_rows: int
    max_rows: int


def row_classes(shape: MatmulShape, mlx_limit: int | None) -> list[RowClass]:
    """Return the classes of a matmul's rows. No class has rows on both sides of `mlx_limit`, where MLX's kernels
    change, or of a tile of ours.
    """
    bounds = {*(ROWS if shape.experts is None else PAIRS)}
    if mlx_limit is not None and 2 < mlx_limit <= max(bounds):
        bounds.add(mlx_limit - 1)
    upper_bounds = sorted(bounds)
    return [RowClass(low + 1, high) for low, high in zip((1, *upper_bounds), upper_bounds, strict=False)]


def mlx_row_limit(shape: MatmulShape, architecture: tuple[int, str] | None) -> int | None:
    """Return from how many rows on (with experts: token-expert pairs) MLX 0.32 reads a weight once for many rows, on a
    GPU of this architecture (`gpu_architecture`); None without a GPU.

    With fewer, it computes each row anew: just below the limit our kernel gains most.
    """
    if architecture is None:
        return None
    if shape.experts is not None:
        return max(SORTED_PAIRS, 4 * shape.experts)
    generation, size = architecture
    if size == "d":
        limits = 32, 18, 12
    elif generation >= 17:
        limits = 33, 25, 13
    elif generation >= 15:
        limits = 13, 15, 13
    else:
        limits = (14, 10, 6) if generation >= 13 else (18, 12, 10)
    width = max(shape.inputs, shape.outputs)
    return limits[0 if width <= 2048 else 1 if width <= 4096 else 2]


class MatmulChoices:
    """Tells `QuantizedMatmuls` which matmuls our kernel computes, by shape and number of rows; none at first."""

    def __init__(self) -> None:
        self._kernel_matmuls: frozenset[tuple[MatmulShape, int]] = frozenset()

    def __call__(self, shape: MatmulShape, rows: int) -> bool:
        """Return whether our kernel computes a matmul."""
        return (shape, rows) in self._kernel_matmuls

    def set_classes(self, kernel_classes: Iterable[tuple[MatmulShape, RowClass]]) -> None:
        """Let our kernel compute the matmuls of these shapes and classes of rows, and no others."""
        self._kernel_matmuls = frozenset(
            (shape, rows) for shape, batch in kernel_classes for rows in range(batch.min_rows, batch.max_rows + 1)
        )


def matmul_jobs(
    matmuls: QuantizedMatmuls, dtype: str, architecture: tuple[int, str] | None
) -> dict[tuple[MatmulShape, RowClass], TuningJob]:
    """Return an autotuning job per matmul shape and class of rows on a GPU of this architecture. The jobs that can
    gain most per second of timing come first. MLX's kernel is the default.

    A class is timed with its fewest rows. MLX's time grows with the rows and ours hardly, so our kernel is chosen only
    where it is the faster one for all of them.
    """
    jobs: dict[tuple[MatmulShape, RowClass], TuningJob] = {}
    expected_gains: dict[tuple[MatmulShape, RowClass], float] = {}
    for shape, modules in matmuls.modules(dtype).items():
        limit = mlx_row_limit(shape, architecture)
        for rows in row_classes(shape, limit):
            read_bytes = shape.weight_bytes * min(shape.experts or 1, rows.min_rows)
            run_modules = modules[: max(1, min(MAX_RUN_MODULES, RUN_BYTES // read_bytes))]
            candidates = (
                Candidate(MLX, _make_prepare(shape, run_modules, rows.min_rows, None), len(run_modules)),
                Candidate(OURS, _make_prepare(shape, run_modules, rows.min_rows, matmuls), len(run_modules)),
            )
            batch = f"{rows.min_rows} to {rows.max_rows} {'rows' if shape.experts is None else 'pairs'}"
            label = f"matmul {shape.label}"
            jobs[shape, rows] = TuningJob(f"{label}; {batch}", label, batch, candidates)
            expected_gains[shape, rows] = _expected_reads(shape, rows, limit) * len(modules) / len(run_modules)
    return dict(sorted(jobs.items(), key=lambda item: (-expected_gains[item[0]], item[0][1].max_rows)))


def _expected_reads(shape: MatmulShape, rows: RowClass, mlx_limit: int | None) -> float:
    """Return roughly how many times as many bytes of weights MLX reads for a class of rows as our kernel does."""
    read_by_mlx = rows.max_rows if mlx_limit is None else min(rows.max_rows, mlx_limit - 1)
    return read_by_mlx / min(rows.max_rows, shape.experts or 1)


def _make_prepare(
    shape: MatmulShape, modules: list[nn.Module], rows: int, matmuls: QuantizedMatmuls | None
) -> Callable[[], Callable[[], object]]:
    """Return `Candidate.prepare` for the modules' matmuls: by our kernel if `matmuls` is given, else by MLX."""

    def prepare() -> Callable[[], object]:
        if matmuls is not None and not matmuls.approves(shape, rows):
            raise CannotServe("it does not run here, or disagrees with float64")
        dims = (rows, shape.inputs) if shape.experts is None else (rows, 1, shape.inputs)
        x = mx.random.normal(dims, key=mx.random.key(0)).astype(getattr(mx, shape.dtype))
        experts = mx.random.randint(0, shape.experts or 1, (rows,), key=mx.random.key(1))
        is_sorted = rows >= SORTED_PAIRS
        experts = mx.sort(experts) if is_sorted else experts
        mx.eval(x, experts)

        def compute() -> None:
            if matmuls is not None:
                mx.eval([matmuls.compute(shape, module, x, experts) for module in modules])
            elif shape.experts is not None:
                mx.eval([module(x, experts, sorted_indices=is_sorted) for module in modules])
            else:
                mx.eval([_compute_by_mlx(module, x) for module in modules])

        return compute

    return prepare


def _compute_by_mlx(module: nn.Module, x: mx.array) -> mx.array:
    """Return a module's matmul as MLX computes it, outside of a step."""
    matmul: mx.array = module.as_linear(x) if isinstance(module, nn.QuantizedEmbedding) else module(x)
    return matmul
