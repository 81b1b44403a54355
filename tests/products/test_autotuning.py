"""Which products our kernel computes: the classes of rows, what is timed for them, and what follows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.switch_layers import SwitchLinear

from cortexmlx.autotune.job import CannotServe
from cortexmlx.metal.lab import sim
from cortexmlx.metal.products.shape import ProductShape, split_rows
from cortexmlx.products.autotuning import MLX, OURS, PAIRS, ROWS, ProductChoices, product_jobs, row_class
from cortexmlx.products.served import QuantizedProducts

SHAPE = ProductShape("float32", "affine", 4, 32, 64, 48)
OF_EXPERTS = ProductShape("float32", "affine", 4, 32, 64, 32, experts=5)


class Model(nn.Module):  # type: ignore[misc]
    """Two products of one shape, a tied head, and experts."""

    def __init__(self, mode: str = "affine") -> None:
        super().__init__()
        mx.random.seed(3)
        self.layers = [nn.Linear(64, 48, bias=False) for _ in range(2)]
        self.embedding = nn.Embedding(40, 64)
        self.switch = SwitchLinear(64, 32, 5, bias=False)
        nn.quantize(self, 32, 4, mode=mode)
        mx.eval(self.parameters())


def served_by(use: Any, model: Model) -> QuantizedProducts:
    served = QuantizedProducts(sim.metal_kernel, use, check=False)
    served.install(model)
    return served


@given(rows=st.integers(0, 600))
def test_a_class_of_rows_is_computed_by_one_variant(rows: int) -> None:
    most = row_class(SHAPE, rows)
    if most is None:
        assert rows < 2 or rows > ROWS[-1]
    else:
        assert rows <= most and split_rows(rows) == split_rows(most) and row_class(SHAPE, most) == most
    pairs = row_class(OF_EXPERTS, rows)
    assert (pairs is None) == (rows < 2 or rows > PAIRS[-1]) and (pairs is None or rows <= pairs)


def test_nothing_is_ours_until_it_is_chosen() -> None:
    choices = ProductChoices()
    assert not any(choices(SHAPE, rows) for rows in range(40))
    choices.set_classes([(SHAPE, 16), (OF_EXPERTS, 32)])
    assert [rows for rows in range(40) if choices(SHAPE, rows)] == list(range(9, 17))
    assert [rows for rows in range(40) if choices(OF_EXPERTS, rows)] == list(range(9, 33))
    choices.set_classes([])
    assert not choices(SHAPE, 9)


def test_there_is_a_job_for_each_shape_and_class_that_steps_can_have() -> None:
    model = Model()
    served = served_by(ProductChoices(), model)
    jobs = product_jobs(served, "float32", max_rows=9)
    head = ProductShape("float32", "affine", 4, 32, 64, 40)
    assert set(jobs) == {
        *((shape, most) for shape in (SHAPE, head) for most in (8, 16)),
        *((OF_EXPERTS, most) for most in PAIRS),
    }
    assert len({job.key for job in jobs.values()}) == len(jobs)
    job = jobs[SHAPE, 16]
    assert (
        job.batch == "9 to 16 rows"
        and [each.name for each in job.candidates] == [MLX, OURS]
        and job.default_candidate == MLX
    )
    assert [each.times for each in job.candidates] == [2, 2]
    assert not product_jobs(served, "float32", max_rows=1).keys() & {(SHAPE, 8)}


def test_scales_that_say_nothing_of_the_rows_take_the_models_dtype() -> None:
    served = served_by(ProductChoices(), Model("mxfp4"))
    assert {shape.dtype for shape, _ in product_jobs(served, "bfloat16", 8)} == {"bfloat16"}
    assert not product_jobs(served_by(ProductChoices(), Model()), "float16", 8), "affine scales are float32 here"


@pytest.mark.parametrize("key", [(SHAPE, 8), (ProductShape("float32", "affine", 4, 32, 64, 40), 8), (OF_EXPERTS, 8)])
def test_both_candidates_compute_the_same_products(key: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is evaluated in a run is compared."""
    served = served_by(ProductChoices(), Model())
    job = product_jobs(served, "float32", 8)[key]
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
    served = served_by(ProductChoices(), Model())
    monkeypatch.setattr(served, "approves", lambda shape, rows: False)
    _, ours = product_jobs(served, "float32", 8)[SHAPE, 8].candidates
    with pytest.raises(CannotServe, match="disagrees"):
        ours.prepare()
