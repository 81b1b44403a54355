"""Autotuning of quantized products: our kernel computes those for which it was the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import mlx.core as mx
import mlx.nn as nn

from cortexmlx.autotune.job import Candidate, CannotServe, TuningJob
from cortexmlx.metal.products.shape import MAX_TILES, TILE, ProductShape
from cortexmlx.products.served import QuantizedProducts

MLX, OURS = "MLX", "quantized_product kernel"

ROWS = tuple(TILE * tiles for tiles in range(1, MAX_TILES + 1))
"""The most rows of each class: those of one tile, of two, ... A single row is MLX's: nothing is shared."""

PAIRS = (8, 32, 128, 512)
"""The most pairs of a token and an expert of each class."""

TOGETHER = 8
"""Products of a run, each with other weights, so that the weights come from memory as in a step."""


def row_class(shape: ProductShape, rows: int) -> int | None:
    """Return the class of a number of rows, as its largest number of rows; None if MLX always computes it."""
    if rows < 2:
        return None
    return next((row_limit for row_limit in _class_limits(shape) if rows <= row_limit), None)


def _class_limits(shape: ProductShape) -> tuple[int, ...]:
    """Return the largest number of rows of each class of a shape."""
    return ROWS if shape.experts is None else PAIRS


class ProductChoices:
    """The products that our kernel computes, by shape and class of rows. None at first: see `Use`."""

    def __init__(self) -> None:
        self._kernel_classes: frozenset[tuple[ProductShape, int | None]] = frozenset()

    def __call__(self, shape: ProductShape, rows: int) -> bool:
        """Return whether our kernel computes a product."""
        return (shape, row_class(shape, rows)) in self._kernel_classes

    def set_classes(self, kernel_classes: Iterable[tuple[ProductShape, int]]) -> None:
        """Let our kernel compute the products of these shapes and classes of rows, and no others."""
        self._kernel_classes = frozenset(kernel_classes)


def product_jobs(products: QuantizedProducts, dtype: str, max_rows: int) -> dict[tuple[ProductShape, int], TuningJob]:
    """Return an autotuning job per product shape and class of rows up to `max_rows`. MLX's kernel is the default."""
    jobs: dict[tuple[ProductShape, int], TuningJob] = {}
    for shape, modules in products.modules(dtype).items():
        run_modules = modules[:TOGETHER]
        for row_limit, min_rows in _row_ranges(shape, max_rows):
            candidates = (
                Candidate(MLX, _make_prepare(shape, run_modules, row_limit, None), len(run_modules)),
                Candidate(OURS, _make_prepare(shape, run_modules, row_limit, products), len(run_modules)),
            )
            batch = f"{min_rows} to {row_limit} {'rows' if shape.experts is None else 'pairs'}"
            jobs[shape, row_limit] = TuningJob(
                f"product {shape.label}; {batch}", f"product {shape.label}", batch, candidates
            )
    return jobs


def _row_ranges(shape: ProductShape, max_rows: int) -> Iterator[tuple[int, int]]:
    """Yield the largest and the smallest number of rows of each class of steps, which are timed as one."""
    min_rows = 2
    for row_limit in _class_limits(shape):
        if shape.experts is None and min_rows > max_rows:
            return
        yield row_limit, min_rows
        min_rows = row_limit + 1


def _make_prepare(
    shape: ProductShape, modules: list[nn.Module], rows: int, products: QuantizedProducts | None
) -> Callable[[], Callable[[], object]]:
    """Return a candidate's `prepare`, for a run of the modules' products by our kernel in `products`; None: by MLX."""

    def prepare() -> Callable[[], object]:
        if products is not None and not products.approves(shape, rows):
            raise CannotServe("it does not run here, or disagrees with float64")
        dims = (rows, shape.inputs) if shape.experts is None else (rows, 1, shape.inputs)
        x = mx.random.normal(dims, key=mx.random.key(0)).astype(getattr(mx, shape.dtype))
        experts = mx.arange(rows) % (shape.experts or 1)
        mx.eval(x, experts)

        def compute() -> None:
            if products is not None:
                mx.eval([products.compute(shape, module, x, experts) for module in modules])
            elif shape.experts is not None:
                mx.eval([module(x, experts) for module in modules])
            else:
                mx.eval([_compute_by_mlx(module, x) for module in modules])

        return compute

    return prepare


def _compute_by_mlx(module: nn.Module, x: mx.array) -> mx.array:
    """Return a module's product as MLX computes it, outside of a step."""
    product: mx.array = module.as_linear(x) if isinstance(module, nn.QuantizedEmbedding) else module(x)
    return product
