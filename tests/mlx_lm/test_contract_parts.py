"""What cortexmlx relies on where mlx-lm cuts a model into parts: see `test_contract.py`."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.mlx_lm.package import enter_mlx_lm
from support.models.tiny import CONFIGS

LLAMA = CONFIGS["llama"]
QWEN2 = LLAMA | {"model_type": "qwen2", "num_hidden_layers": 3}
SECOND: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 2)


def built(config: dict[str, Any]) -> Any:
    enter_mlx_lm()
    arch = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    return arch.Model(arch.ModelArgs.from_dict(config))


class Recorder:
    """A cache that hands back what it is given."""

    offset = 0
    keys = mx.zeros(1)

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


def test_a_class_is_cut_for_a_group_that_only_has_a_rank_and_a_size() -> None:
    model, whole = built(LLAMA), built(LLAMA)
    model.shard(SECOND)
    attention = model.layers[0].self_attn
    assert (attention.n_heads, attention.n_kv_heads) == (2, 1)
    assert attention.k_proj.weight.shape[0] * 2 == whole.layers[0].self_attn.k_proj.weight.shape[0]
    part = built(QWEN2).model
    assert isinstance(part, importlib.import_module("mlx_lm.models.pipeline").PipelineMixin)
    part.pipeline(SECOND)
    assert (part.pipeline_rank, len(part.pipeline_layers), part.start_idx) == (1, 1, 0)


def test_a_pipeline_sends_before_the_keys_of_its_last_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(QWEN2)
    model.model.pipeline(SECOND)
    sent: list[tuple[mx.array, int]] = []
    monkeypatch.setattr(mx.distributed, "send", lambda h, to: sent.append((h, to)) or h)
    monkeypatch.setattr(mx.distributed, "all_gather", lambda h: h)
    cache = Recorder()
    keys = cache.keys
    model(mx.array([[1], [2]]), cache=[cache])
    assert [to for _, to in sent] == [0] and cache.keys is not keys


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_cut_layer_sums_twice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/hosts.md counts a token's exchanges. `SharedSampler` adds one."""
    model = built(CONFIGS[kind])
    model.shard(mx.distributed.init())
    sums: list[mx.array] = []
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, **_: sums.append(x) or x)
    mx.eval(model(mx.array([[1]])))
    assert len(sums) == 2 * len(model.layers) > 2
