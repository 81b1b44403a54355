"""What the layers of a model ask of attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.attention.decode_methods import LayerAttention, layer_key, probe_layer_shapes
from cortexmlx.attention.paged import AttentionParams, PagedKV
from cortexmlx.kv.spec import KVSpec
from support.engine.core_driver import Driver
from support.models.tiny import write_tiny

Tiny = Callable[[str], Path]


def layers(tiny: Tiny, name: str, **config: Any) -> list[LayerAttention]:
    core = Driver(tiny(name), **config).core
    return list(probe_layer_shapes(core.loaded.model, core.runner.arena).values())


def test_layers_that_ask_for_the_same_are_one_with_the_largest_window(tiny: Tiny) -> None:
    assert layers(tiny, "llama") == [
        LayerAttention("float32", 4, KVSpec(2, 8, 8, "float32"), 8, 8**-0.5, None, None, False, None)
    ]
    [both] = layers(tiny, "windowed llama")
    assert both.window is None, "one of its layers sees everything"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt_oss", {"sinks": "float32"}),
        ("gemma2", {"softcap": 4.0}),
        ("cohere2", {"sinks": None}),
        ("gpt2", {"slopes": False}),
    ],
)
def test_what_else_is_asked_for(name: str, expected: dict[str, Any], tiny: Tiny) -> None:
    [layer] = layers(tiny, name)
    assert {field: getattr(layer, field) for field in expected} == expected


def test_latent_and_quantized_layers_are_what_their_specs_say(tiny: Tiny, tmp_path: Path) -> None:
    [latent] = layers(tiny, "deepseek_v3")
    assert latent.spec.value_in_key and latent.query_heads == 4 and "latent" in latent.label
    wide = write_tiny(tmp_path, "llama", head_dim=32)
    [quantized] = layers(lambda _: wide, "llama", kv_bits=8)
    assert (quantized.spec.kv_bits, quantized.spec.kv_group_size) == (8, 32) and "8-bit" in quantized.label


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2", "deepseek_v3", "llama4", "gemma3n"])
def test_steps_ask_by_the_keys_that_were_found(name: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice is looked up by the key of a step's layer: one that was not found would never have a choice."""
    driver = Driver(tiny(name))
    found = probe_layer_shapes(driver.core.loaded.model, driver.core.runner.arena)
    asked = set()
    attend = driver.core.backend.attend

    def noting(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
        if kv.step.rows:
            asked.add(layer_key(queries, kv, params))
        return attend(queries, kv, params)

    monkeypatch.setattr(driver.core.runner, "_attend", noting)
    driver.answers([[5, 6, 7]], 4)
    assert asked and asked <= found.keys()
