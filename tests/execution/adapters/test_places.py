"""Where an adapter can be added to a model's modules, and where not."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from cortexmlx.execution.adapters import (
    find_unsupported_layers,
    linear_layers,
    linear_size,
    make_adapted_class,
    swap_classes,
)
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.models import load_model
from support.engine.core_driver import Driver


def test_the_size_of_a_linear_layer_does_not_depend_on_its_bits() -> None:
    plain = nn.Linear(64, 96)
    assert linear_size(plain) == (64, 96)
    for bits in (2, 3, 4, 6, 8):
        assert linear_size(nn.QuantizedLinear.from_linear(plain, 32, bits)) == (64, 96)
    assert linear_size(nn.Embedding(64, 96)) is None and linear_size(nn.RMSNorm(8)) is None


def test_modules_ask_only_in_the_context_and_are_what_they_were_after_it() -> None:
    layer, x = nn.Linear(4, 5), mx.ones((2, 4))
    layer.adapter_hook = lambda x, out: out + 1
    before = layer(x)
    with swap_classes([layer]):
        assert isinstance(layer, nn.Linear) and type(layer) is make_adapted_class(nn.Linear)
        assert mx.allclose(layer(x), before + 1).item()
    assert type(layer) is nn.Linear and mx.array_equal(layer(x), before).item()
    with pytest.raises(ZeroDivisionError), swap_classes([layer]):
        1 / 0  # noqa: B018
    assert type(layer) is nn.Linear


def refused(folder: Any) -> dict[str, str]:
    driver = Driver(folder)
    runner = driver.core.runner
    assert isinstance(runner, ModelRunner)
    found = find_unsupported_layers(linear_layers(runner.model), runner.adapters._lazy_pass)
    driver.core.release()
    return found


def test_all_linear_layers_of_a_llama_may_have_one(tiny: Any) -> None:
    assert refused(tiny("llama")) == {}


def test_the_layer_that_gives_the_logits_may_have_none(tiny: Any) -> None:
    (name,) = refused(tiny("qwen3"))
    assert name == "lm_head"


def test_a_router_may_have_one(tiny: Any) -> None:
    names = linear_layers(load_model(str(tiny("mixtral"))).model)
    assert "model.layers.0.block_sparse_moe.gate" in names
    assert "model.layers.0.block_sparse_moe.gate" not in refused(tiny("mixtral"))


def test_layers_that_are_not_used_may_have_one_and_those_whose_weights_are_read_may_not(tiny: Any) -> None:
    """Gemma 3n's last layers attend to the keys of earlier ones, and its gates are matrices that it reads."""
    found = refused(tiny("gemma3n"))
    assert found and all(name.endswith("_coefs") and "reads its weights" in reason for name, reason in found.items())


def test_nothing_is_left_in_the_modules(tiny: Any) -> None:
    driver = Driver(tiny("llama"))
    runner = driver.core.runner
    assert isinstance(runner, ModelRunner)
    modules = linear_layers(runner.model)
    find_unsupported_layers(modules, runner.adapters._lazy_pass)
    assert not any("adapter_hook" in vars(module) or type(module) is not nn.Linear for module in modules.values())
    driver.core.release()


class _Head(nn.Module):  # type: ignore[misc]
    """A layer whose weights are read, two that are called, one that sees some tokens, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called, self.some, self.unused, self.both = (nn.Linear(4, 4) for _ in range(5))

    def __call__(self, x: mx.array) -> mx.array:
        self.some(x[:1])
        out: mx.array = self.called(x) @ self.read.weight + self.both(x) + self.both["weight"][0]
        return out


def test_the_reasons() -> None:
    model = _Head()
    found = find_unsupported_layers(linear_layers(model), lambda tokens, rows: model(mx.zeros((tokens.shape[0], 1, 4))))
    assert sorted(found) == ["both", "read", "some"]
    assert "reads its weights" in found["read"] == found["both"] and "all tokens" in found["some"]
