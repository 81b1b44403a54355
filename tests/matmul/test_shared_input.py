"""Linear modules that get the same array: one matmul for a lone row, with the same bits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.matmul import served
from cortexmlx.matmul.served import QuantizedMatmuls
from cortexmlx.metal.lab import sim


def linear(outputs: int, seed: int, group: int = 32, bias: bool = False, mode: str = "affine") -> nn.QuantizedLinear:
    mx.random.seed(seed)
    module = nn.QuantizedLinear.from_linear(nn.Linear(64, outputs, bias=bias), group, 4, mode=mode)
    mx.eval(module.parameters())
    return module


class Layer(nn.Module):  # type: ignore[misc]
    """Three modules get x, one of them in other groups; two get what the first returned."""

    def __init__(self, mode: str = "affine") -> None:
        super().__init__()
        self.q, self.k = linear(64, 1, bias=True, mode=mode), linear(16, 2, bias=True, mode=mode)
        self.v, self.w = linear(24, 3, mode=mode), linear(8, 4, 64)
        self.gate, self.up = linear(48, 5, mode=mode), linear(48, 6, mode=mode)

    def __call__(self, x: mx.array) -> mx.array:
        q, k, v, w = self.q(x), self.k(x), self.v(x), self.w(x)
        h = q + mx.concatenate([k, v, v], axis=-1) + mx.tile(w, 8)
        return self.gate(h) * self.up(h)


def no_kernel(shape: Any, rows: int) -> bool:
    return False


def shared(layer: Layer) -> tuple[QuantizedMatmuls, int]:
    matmuls = QuantizedMatmuls(sim.metal_kernel, no_kernel, check=False)
    matmuls.install(layer)
    return matmuls, matmuls.share_inputs(lambda: layer(mx.zeros((2, 1, 64))))


def row(seed: int, rows: int = 1) -> mx.array:
    return mx.random.normal((rows, 1, 64), key=mx.random.key(seed))


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_a_lone_row_has_the_same_bits_by_fewer_matmuls(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(mode)
    wanted, several = np.array(layer(row(0))), np.array(layer(row(1, 3)))
    matmuls, saved = shared(layer)
    assert saved == 3, "queries, keys and values, and two of the MLP: biases differ, and are added after it"
    multiplied, real = [], mx.quantized_matmul
    monkeypatch.setattr(mx, "quantized_matmul", lambda *given, **more: multiplied.append(1) or real(*given, **more))
    with matmuls.step():
        assert np.array_equal(np.array(layer(row(0))), wanted) and len(multiplied) == 3
        multiplied.clear()
        assert np.array_equal(np.array(layer(row(1, 3))), several) and len(multiplied) == 6
    multiplied.clear()
    assert np.array_equal(np.array(layer(row(0))), wanted) and len(multiplied) == 6, "outside of a step"


def test_the_weights_are_views_of_one_array_and_take_no_more_memory() -> None:
    layer = Layer()
    before = mx.get_active_memory()
    shared(layer)
    assert mx.get_active_memory() <= before + 4096
    assert all(memoryview(module["weight"]).c_contiguous for module in (layer.q, layer.k, layer.v, layer.up))


def test_joining_holds_the_weights_of_one_group_twice_and_no_others() -> None:
    model = nn.Sequential(*([Layer() for _ in range(12)]))
    weights = mx.get_active_memory()
    one = sum(
        module[name].nbytes
        for module in (model.layers[0].gate, model.layers[0].up)
        for name in ("weight", "scales", "biases")
    )
    matmuls = QuantizedMatmuls(sim.metal_kernel, no_kernel, check=False)
    matmuls.install(model)

    def run_lazily() -> None:
        x = mx.zeros((2, 1, 64))
        for layer in model.layers:
            x = layer(mx.concatenate([x, x], axis=-1)[..., :64])

    mx.reset_peak_memory()
    assert matmuls.share_inputs(run_lazily) == 12 * 3
    assert mx.get_peak_memory() <= weights + 6 * one


@given(calls=st.lists(st.tuples(st.sampled_from("qkv"), st.integers(0, 2)), max_size=12))
def test_any_order_of_calls_gives_each_module_its_own_matmul(calls: list[tuple[str, int]]) -> None:
    """Also one that is left out, comes twice, or gets another array."""
    layer, rows = Layer(), [row(n) for n in range(3)]
    wanted = {(name, n): np.array(getattr(layer, name)(rows[n])) for name in "qkv" for n in range(3)}
    matmuls, _ = shared(layer)
    with matmuls.step():
        for name, n in calls:
            assert np.array_equal(np.array(getattr(layer, name)(rows[n])), wanted[name, n])


def test_nothing_is_kept_of_a_step_whose_modules_were_all_called() -> None:
    layer = Layer()
    matmuls, _ = shared(layer)
    with matmuls.step():
        layer(row(0))
    assert layer.q.matmul.shared._input is None and layer.q.matmul.shared._output is None


def test_modules_without_a_shared_input_get_their_classes_back_and_can_be_served_again() -> None:
    layer = Layer()
    matmuls, _ = shared(layer)
    matmuls.keep_shared()
    kinds = {name: type(getattr(layer, name)).__name__ for name in ("q", "up", "w")}
    assert kinds == {"q": "_ServedLinear", "up": "_ServedLinear", "w": "QuantizedLinear"}
    matmuls.install(layer)
    assert type(layer.w).__name__ == "_ServedLinear" and layer.q.matmul.shared is layer.k.matmul.shared
    matmuls.remove()
    assert type(layer.q) is type(layer.w) is nn.QuantizedLinear


def test_without_memory_to_join_them_weights_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    wanted = np.array(layer(row(0)))

    def refuse(modules: Any) -> Any:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    monkeypatch.setattr(served, "SharedInput", refuse)
    matmuls, saved = shared(layer)
    with matmuls.step():
        assert saved == 0 and np.array_equal(np.array(layer(row(0))), wanted)
