"""Assistants of Gemma 4: they draft what float64 NumPy drafts, and those that do not fit are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models import load_model
from cortexmlx.models.assistant import read_assistant
from support.models.assistants import TEXT, drafted_by_float64, write_pair
from support.models.draft_heads import pack, rounded
from support.models.tiny import tokens_of, write_tiny

pytestmark = pytest.mark.usefixtures("a_linux_cpu")


def drafted(model: Path, assistant: Path, text: list[int], count: int) -> list[int]:
    """What the assistant drafts, with keys and values of mlx-lm's caches. The text is no longer than the window."""
    language = load_model(model).model
    helper, caches = read_assistant(assistant, language), [KVCache() for _ in range(3)]
    states = language.model(mx.array(text[:-1])[None], cache=caches)[:, -1:]
    tokens = [mx.array(text[-1:])]

    def find_keys(layer: int) -> tuple[mx.array, ...]:
        return tuple(array[:, :, : len(text) - 1] for array in caches[layer].state[:2])

    for _ in range(count):
        embeddings = helper.embed(tokens[-1])[:, None]
        states, own = helper(states, embeddings, mx.array([len(text) - 2]), find_keys)
        tokens.append(helper.choose(own))
    return mx.concatenate(tokens[1:]).tolist()


@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_it_drafts_what_float64_drafts(tmp_path: Path, clusters: bool, packed: bool) -> None:
    changes = {"quantization": {"group_size": 32, "bits": 4}} if packed else {}
    model, assistant, tensors = write_pair(tmp_path, clusters=clusters, **changes)
    if packed:
        mx.save_safetensors(str(assistant / "model.safetensors"), pack(tensors, lambda path: 4))
        tensors = rounded(tensors, lambda path: 4)
    texts = [tokens_of(11, seed=seed) for seed in range(6)]
    wanted = [drafted_by_float64(model, tensors, text, 4) for text in texts]
    assert [drafted(model, assistant, text, 4) for text in texts] == wanted
    assert len({token for tokens in wanted for token in tokens}) > 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_hidden_size": 48}, r"for a model of width 48 with 320 tokens, but this one has 32 and 320"),
        ({"text_config": TEXT | {"vocab_size": 640}}, "with 640 tokens"),
        ({"text_config": TEXT | {"global_head_dim": 32}}, r"4 heads of 32, but the model has 1 heads of 16"),
        ({"text_config": TEXT | {"layer_types": ["full_attention"]}}, "1 layer types for 3 layers"),
        ({"text_config": TEXT | {"enable_moe_block": True}}, "experts"),
        ({"text_config": "none"}, "is not understood"),
        ({"use_ordered_embeddings": True, "num_centroids": 7}, "320 tokens in 7 clusters"),
    ],
)
def test_an_assistant_of_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model, assistant, _ = write_pair(tmp_path, **changes)
    with pytest.raises(ModelUnsupported, match=message):
        read_assistant(assistant, load_model(model).model)


def test_a_damaged_assistant_or_one_of_another_family_is_refused(tmp_path: Path) -> None:
    _, assistant, tensors = write_pair(tmp_path)
    with pytest.raises(ModelUnsupported, match="for models of Gemma 4, and this one is none"):
        read_assistant(assistant, load_model(write_tiny(tmp_path / "llama")).model)
    with pytest.raises(ModelUnsupported, match=r"only drafts tokens .* give that model, and --draft"):
        load_model(assistant)
    tensors.pop("pre_projection.weight")
    mx.save_safetensors(str(assistant / "model.safetensors"), tensors)
    with pytest.raises(ModelCorrupt, match=r"lacks 1 of \d+ tensors, for example pre_projection\.weight"):
        read_assistant(assistant, load_model(tmp_path / "model").model)
