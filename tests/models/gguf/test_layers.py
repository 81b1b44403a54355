"""Packed layers with fine scales: exact, and their answers have the activations' type, whatever MLX widens to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.models import load_model
from cortexmlx.models.gguf.load import CastingEmbedding, CastingLinear, CastingSwitchLinear, make_packed_layer
from cortexmlx.models.gguf.tensors import PackedArrays
from support.gguf.export import export, logits_of, tiny


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded keeps the types of the file, as on a GPU."""
    monkeypatch.setattr("cortexmlx.models.load._is_float32_faster", lambda: False)


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", "float16"), ("mixtral", "float16"), pytest.param("gemma3", "bfloat16", marks=pytest.mark.slow)],
)
def test_a_model_of_k_quants_computes_in_half_precision_between_its_layers(
    tmp_path: Path, name: str, dtype: str
) -> None:
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    path = tmp_path / "tiny.gguf"
    wanted = logits_of(export(path, tiny(256)[name], "Q4_K"))
    loaded = load_model(path)
    kind = getattr(mx, dtype)
    cache = make_prompt_cache(loaded.model)
    logits = loaded.model(mx.array([[1, 2, 3]]), cache=cache)
    assert loaded.dtype == dtype
    assert {logits.dtype, *(layer.keys.dtype for layer in cache)} == {kind}
    tolerance = {"float16": 1e-2, "bfloat16": 6e-2}[dtype]
    assert np.abs(logits_of(loaded.model) - wanted).max() < tolerance * np.abs(wanted).max()


@pytest.mark.usefixtures("a_gpu")
def test_only_scales_that_need_it_are_float32(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    export(path, tiny(256)["llama"], lambda name: "Q4_K" if "attn" in name else "Q4_0")
    layer = load_model(path).model.layers[0]
    assert isinstance(layer.self_attn.q_proj, CastingLinear) and str(layer.self_attn.q_proj.scales.dtype).endswith(
        "float32"
    )
    assert not isinstance(layer.mlp.up_proj, CastingLinear) and str(layer.mlp.up_proj.scales.dtype).endswith("float16")


def test_no_layer_stands_for_one_that_cannot_be_packed() -> None:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.switch_layers import SwitchLinear

    fine = PackedArrays(None, mx.zeros((8, 1)), mx.zeros((8, 1)), 4, "affine")
    kinds: list[tuple[Any, type | None]] = [
        (nn.Linear(32, 8), CastingLinear),
        (nn.Embedding(8, 32), CastingEmbedding),
        (SwitchLinear(32, 8, 2), CastingSwitchLinear),
        (nn.RMSNorm(32), None),
    ]
    for plain, twin in kinds:
        found = make_packed_layer(plain, fine, mx.float16)
        assert type(found) is (type(None) if twin is None else twin)
    assert type(make_packed_layer(nn.Linear(32, 8), fine, mx.float32)) is nn.QuantizedLinear
