"""A model of each kind beside mlx-lm: what is built is what is said, and every case is measured."""

from __future__ import annotations

import pytest
from mlx_lm.utils import _get_classes

from cortexmlx.bench.studies import layer_kinds
from support.models.bench_model import SMALL

CACHES = {
    "full": {"KVCache"},
    "windows": {"KVCache", "RotatingKVCache"},
    "experts and sinks": {"KVCache", "RotatingKVCache"},
    "latent": {"KVCache"},
    "hybrid": {"KVCache", "ArraysCache"},
    "hybrid of convolutions": {"KVCache", "ArraysCache"},
    "recurrent": {"ArraysCache"},
}


@pytest.mark.parametrize("kind", layer_kinds.KINDS)
def test_a_kind_has_eight_layers_of_what_it_is_called(kind: str) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model_class, args_class = _get_classes(config := layer_kinds.COMMON | layer_kinds.KINDS[kind])
    model = model_class(args_class.from_dict(config))  # lazy: no weight is computed
    caches = make_prompt_cache(model)
    assert len(model.layers) == len(caches) == 8
    assert {type(cache).__name__ for cache in caches} == CACHES[kind]


def test_every_case_is_measured_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_kinds, "_SHAPE", layer_kinds.ComparisonSizes((24,), 8, (8,)))
    measured = layer_kinds.compare_kind("full", 1, SMALL)
    assert [c["case"].split(",")[0] for c in measured.parts[0].records] == [
        "pp24",
        "second chat turn",
        "tg8 x8",
        "tg8 x16",
    ]
    assert all(
        c["same_tokens"] == c["requests"] > 0 and min(*c["ours"], *c["theirs"]) > 0 for c in measured.parts[0].records
    )
    assert "random weights, kind: full" in measured.notes
