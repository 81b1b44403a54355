"""A model's quantized modules ask whether our kernel serves, in steps alone. MLX's own matmuls judge."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from cortexmlx.matmul.served import QuantizedMatmuls, Use
from cortexmlx.metal.lab import sim
from cortexmlx.metal.matmul.shape import MatmulShape


class Calls:
    """`use` for all matmuls, or none, that notes them."""

    def __init__(self, answer: bool = True) -> None:
        self.answer = answer
        self.asked: list[tuple[MatmulShape, int]] = []

    def __call__(self, shape: MatmulShape, rows: int) -> bool:
        self.asked.append((shape, rows))
        return self.answer


class Model(nn.Module):  # type: ignore[misc]
    """One module of each kind."""

    def __init__(self) -> None:
        super().__init__()
        mx.random.seed(3)
        self.linear = nn.Linear(64, 48, bias=True)
        self.embedding = nn.Embedding(40, 64)
        self.switch = SwitchLinear(64, 32, 5, bias=True)
        self.experts = SwitchGLU(64, 96, 8)
        self.linear.bias = mx.random.normal((48,))
        self.switch.bias = mx.random.normal((5, 32))
        nn.quantize(self, 32, 4)
        mx.eval(self.parameters())


def draw(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(1).standard_normal(shape).astype(np.float32)).astype(dtype)


def launches_of(factory: Callable[..., Any], launched: list[str]) -> Callable[..., Any]:
    """A factory whose kernels note that they run."""

    def make(*, name: str, **options: Any) -> Any:
        kernel = factory(name=name, **options)

        def call(**given: Any) -> Any:
            launched.append(name)
            return kernel(**given)

        return call

    return make


def matmuls(use: Use, launched: list[str] | None = None) -> QuantizedMatmuls:
    return QuantizedMatmuls(launches_of(sim.metal_kernel, [] if launched is None else launched), use, check=False)


ROWS = draw(3, 1, 64)
PAIRS = mx.array([[[0, 3]], [[3, 1]], [[2, 3]]], mx.uint32)
CALLS: dict[str, Callable[[Model], mx.array]] = {
    "linear": lambda m: m.linear(ROWS),
    "embedding": lambda m: m.embedding.as_linear(ROWS),
    "switch": lambda m: m.switch(ROWS[:, :, None, None], PAIRS),
    "a row for each pair": lambda m: m.switch(draw(3, 1, 2, 1, 64), PAIRS),
    "experts": lambda m: m.experts(ROWS, PAIRS),
    "sorted experts": lambda m: m.experts(draw(22, 1, 64), mx.array(np.arange(66).reshape(22, 1, 3) % 7, mx.uint32)),
}


@pytest.mark.parametrize("name", CALLS)
def test_products_in_a_step_are_those_of_mlx(name: str) -> None:
    model, launched = Model(), list[str]()
    wanted = CALLS[name](model)
    served = matmuls(Calls(), launched)
    assert served.install(model) == 6
    with served.step():
        got = CALLS[name](model)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert mx.allclose(got, wanted, rtol=1e-4, atol=1e-4) and len(launched) == (3 if "experts" in name else 1)


def test_outside_of_a_step_and_where_use_says_no_they_are_mlxs_own() -> None:
    model, launched, use = Model(), list[str](), Calls(answer=False)
    wanted = {name: np.array(call(model)) for name, call in CALLS.items()}
    served = matmuls(use, launched)
    served.install(model)
    outside = {name: np.array(call(model)) for name, call in CALLS.items()}
    assert not use.asked
    with served.step():
        refused = {name: np.array(call(model)) for name, call in CALLS.items()}
    assert use.asked and not launched
    for name in CALLS:
        assert np.array_equal(outside[name], wanted[name]) and np.array_equal(refused[name], wanted[name])


def test_use_is_asked_with_the_shape_and_the_rows() -> None:
    model, use = Model(), Calls(answer=False)
    served = matmuls(use)
    served.install(model)
    with served.step():
        CALLS["linear"](model)
        CALLS["switch"](model)
    form = ("float32", "affine", 4, 32, 64)
    assert use.asked == [(MatmulShape(*form, 48), 3), (MatmulShape(*form, 32, experts=5), 6)]


def test_an_exception_in_a_step_ends_it() -> None:
    model, use = Model(), Calls()
    served = matmuls(use)
    served.install(model)
    with pytest.raises(ZeroDivisionError), served.step():
        _ = 1 / 0
    CALLS["linear"](model)
    assert not use.asked


def test_modules_are_left_as_they_were() -> None:
    model = Model()
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    parameters = [name for name, _ in nn.utils.tree_flatten(model.parameters())]
    served = matmuls(Calls())
    served.install(model)
    assert type(model.linear) is not nn.QuantizedLinear and isinstance(model.linear, nn.QuantizedLinear)
    assert isinstance(model.switch, QuantizedSwitchLinear)
    assert [name for name, _ in nn.utils.tree_flatten(model.parameters())] == parameters
    served.remove()
    served.remove()
    assert {name: (type(module), dict(vars(module))) for name, module in model.named_modules()} == before


def test_the_embedding_still_embeds() -> None:
    model = Model()
    tokens = mx.array([[1], [7]])
    wanted = np.array(model.embedding(tokens))
    served = matmuls(Calls())
    served.install(model)
    with served.step():
        assert np.array_equal(np.array(model.embedding(tokens)), wanted)


class Own(nn.QuantizedLinear):  # type: ignore[misc]
    """A module that computes in a way of its own."""


def test_what_the_kernel_cannot_serve_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Module()
    model.own = Own(64, 48, False, 32, 4)
    model.wide = nn.QuantizedLinear(256, 48, False, 128, 4)
    model.plain = nn.Linear(64, 48)
    model.scaled = nn.QuantizedLinear(64, 48, False, mode="mxfp4")
    model.scaled.global_scale = mx.array(2.0)
    model.turned = nn.QuantizedLinear(64, 64, False, 32, 4)
    model.turned.weight = mx.contiguous(model.turned.weight.T).T
    with caplog.at_level(logging.WARNING):
        assert matmuls(Calls()).install(model) == 0
    assert "not contiguous" in caplog.text and "matmul" not in vars(model.turned)
    assert [type(module) for module in (model.own, model.wide, model.turned)] == [
        Own,
        nn.QuantizedLinear,
        nn.QuantizedLinear,
    ]


def test_rows_of_another_dtype_than_the_scales_are_mlxs() -> None:
    model, use = Model(), Calls()
    served = matmuls(use)
    served.install(model)
    with served.step():
        model.linear(draw(3, 1, 64, dtype=mx.float16))
    assert not use.asked


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_mxfp4_has_the_dtype_of_its_rows(dtype: mx.Dtype) -> None:
    model, use = nn.Module(), Calls()
    model.linear = nn.QuantizedLinear(64, 48, False, mode="mxfp4")
    x = draw(3, 1, 64, dtype=dtype)
    wanted = model.linear(x)
    served = matmuls(use)
    served.install(model)
    with served.step():
        got = model.linear(x)
    [(shape, rows)] = use.asked
    assert (got.dtype, rows) == (wanted.dtype, 3) and shape.mode == "mxfp4"
    assert mx.allclose(got.astype(mx.float32), wanted.astype(mx.float32), rtol=0.02, atol=0.02)


def test_more_rows_than_the_kernel_has_are_mlxs() -> None:
    model, launched = Model(), list[str]()
    served = matmuls(Calls(), launched)
    served.install(model)
    with served.step():
        model.linear(draw(33, 1, 64))
        model.switch(draw(3, 1, 1, 2, 64), PAIRS)
    assert not launched


def test_a_kernel_that_disagrees_is_disabled_until_it_is_reconsidered(caplog: pytest.LogCaptureFixture) -> None:
    model, launched = Model(), list[str]()

    def wrong(*, header: str, **options: Any) -> Any:
        return launches_of(sim.metal_kernel, launched)(header=header.replace("T(sum)", "T(2.0f * sum)"), **options)

    served = QuantizedMatmuls(wrong, Calls())
    served.install(model)
    wanted = np.array(model.linear(ROWS))
    with served.step(), caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert np.array_equal(np.array(model.linear(ROWS)), wanted)
    assert len(launched) == 1, "the check's own launch"
    assert "differs from the matmul in float64" in served.notes()[0]
    assert (
        caplog.text.count("matmuls (float32, 4 bits in groups of 32, 64 to 48, 3 rows) runs on MLX's own kernels") == 1
    )
    served.reconsider()
    assert served.notes() == ()
    with served.step():
        model.linear(ROWS)
    assert len(launched) == 2


def test_each_kernel_is_checked() -> None:
    """One for each format, number of slices and number of tiles."""
    launched = list[str]()
    served = QuantizedMatmuls(launches_of(sim.metal_kernel, launched), Calls())
    form = MatmulShape("float32", "affine", 4, 32, 64, 48)
    changes: list[dict[str, Any]] = [{}, {}, {"mode": "mxfp4"}, {"inputs": 128}]
    for checks, (change, rows) in enumerate(zip(changes, (8, 16, 8, 8), strict=True)):
        assert served.approves(replace(form, **change), rows) and len(launched) == checks + 1


def test_gate_and_down_projections_of_experts_are_one_variant() -> None:
    """Several pairs of a row, or a row for each pair: what is checked for one is what serves the other."""
    model, templates = Model(), list[Any]()

    def noting(**options: Any) -> Any:
        kernel = sim.metal_kernel(**options)

        def call(**given: Any) -> Any:
            templates.append(given["template"])
            return kernel(**given)

        return call

    served = QuantizedMatmuls(noting, Calls(), check=False)
    served.install(model)
    with served.step():
        for name in ("switch", "a row for each pair"):
            mx.eval(CALLS[name](model))
    assert len(templates) == 2 and templates[0] == templates[1]
