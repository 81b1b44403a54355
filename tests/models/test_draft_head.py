"""Draft heads in checkpoints: computed as float64 NumPy and mlx-lm's own layer compute them, in every stored layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import _get_classes

from cortexmlx.attention.mlx_lm_hook import CustomHandle, LayerCache, install_attention_hook
from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models import load_model
from cortexmlx.models.draft_head import DraftHead, read_draft_head
from support.models import draft_heads
from support.models.draft_heads import Tensors, as_made, write_draft_head
from support.models.recurrent import RECURRENT
from support.models.tiny import write_tiny

TOKENS = 6
INPUTS = [np.random.default_rng(seed).standard_normal((TOKENS, 32)).astype(np.float32) for seed in (1, 2)]
"""Hidden states and embeddings of next tokens, `[TOKENS, 32]` each."""


def judge(head: Tensors) -> np.ndarray:
    """The states of a dense head for `INPUTS`, all positions at once, in float64."""
    weights = {path: np.array(value.astype(mx.float32)).astype(np.float64) for path, value in head.items()}
    hidden, embeddings = (values.astype(np.float64) for values in INPUTS)

    def norm(values: np.ndarray, path: str) -> np.ndarray:
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5) * weights[f"{path}.weight"]

    def project(values: np.ndarray, path: str) -> np.ndarray:
        return values @ weights[f"{path}.weight"].T

    def rotate(values: np.ndarray) -> np.ndarray:  # a quarter of 8 numbers: one pair, whose wavelength is 2 pi
        angles = np.arange(TOKENS)[:, None]
        first, second = values[..., 0], values[..., 1]
        turned = [first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)]
        return np.concatenate([np.stack(turned, -1), values[..., 2:]], -1)

    both = [norm(embeddings, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")]
    x = project(np.concatenate(both, -1), "fc")
    inside, attention = norm(x, "layers.0.input_layernorm"), "layers.0.self_attn"
    queries, gates = np.split(project(inside, f"{attention}.q_proj").reshape(TOKENS, 4, 16), 2, -1)
    keys, values = (project(inside, f"{attention}.{kind}_proj").reshape(TOKENS, 2, 8) for kind in "kv")
    queries, keys = rotate(norm(queries, f"{attention}.q_norm")), rotate(norm(keys, f"{attention}.k_norm"))
    scores = np.einsum("qhd,khd->hqk", queries, keys.repeat(2, 1)) * 8**-0.5
    shares = np.exp(scores) * np.tri(TOKENS)
    seen = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), values.repeat(2, 1))
    x = x + project((seen / (1 + np.exp(-gates))).reshape(TOKENS, 32), f"{attention}.o_proj")
    inside, mlp = norm(x, "layers.0.post_attention_layernorm"), "layers.0.mlp"
    gate = project(inside, f"{mlp}.gate_proj")
    x = x + project(gate / (1 + np.exp(-gate)) * project(inside, f"{mlp}.up_proj"), f"{mlp}.down_proj")
    return norm(x, "norm")


def layer_judge(head: Tensors, folder: Path) -> np.ndarray:
    """The states of a head whose layer is mlx-lm's, the second of the model with these weights."""
    model = load_model(folder).model
    layer = model.layers[1]
    layer.load_weights([(p.removeprefix("layers.0."), value) for p, value in head.items() if p.startswith("layers.0.")])
    hidden, embeddings = (mx.array(values[None]) for values in INPUTS)
    before = [(embeddings, "pre_fc_norm_embedding.weight"), (hidden, "pre_fc_norm_hidden.weight")]
    joined = mx.concatenate([mx.fast.rms_norm(values, head[path], 1e-5) for values, path in before], -1)
    out = layer(joined @ head["fc.weight"].T, "causal", None)
    return np.array(mx.fast.rms_norm(out, head["norm.weight"], 1e-5))[0]


pytestmark = pytest.mark.usefixtures("a_linux_cpu")


def read(folder: Path, **options: Any) -> DraftHead | None:
    loaded = load_model(folder, **options)
    return read_draft_head(folder, loaded.config, loaded.model)


def states(head: Any, cache: Any = None, part: slice = slice(None)) -> np.ndarray:
    hidden, embeddings = (mx.array(values[None, part]) for values in INPUTS)
    return np.array(head(hidden, embeddings, cache))[0]


class FlatHandle(CustomHandle):
    """The keys and values of flat tokens, one row: each token sees those before it and itself."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self.keys, self.values = keys, values

    def attend(self, queries: mx.array, scale: float, score_term: mx.array | None) -> mx.array:
        rows = [array.transpose(2, 1, 0, 3) for array in (queries, self.keys, self.values)]
        return mx.fast.scaled_dot_product_attention(*rows, scale=scale, mask="causal").transpose(2, 1, 0, 3)


def test_a_dense_head_computes_what_float64_computes_in_pieces_and_on_flat_tokens(tmp_path: Path) -> None:
    wanted = judge(write_draft_head(tmp_path, "qwen3_5"))
    head, cache = read(tmp_path), KVCache()
    assert head is not None
    np.testing.assert_allclose(states(head), wanted, atol=1e-4)
    pieces = [states(head, cache, part) for part in (slice(0, 4), slice(4, 5), slice(5, 6))]
    np.testing.assert_allclose(np.concatenate(pieces), wanted, atol=1e-4)
    install_attention_hook()
    flat = LayerCache(0, lambda _, keys, values: FlatHandle(keys, values))
    flat.begin(mx.arange(TOKENS))
    hidden, embeddings = (mx.array(values[:, None]) for values in INPUTS)
    np.testing.assert_allclose(np.array(head(hidden, embeddings, flat))[:, 0], wanted, atol=1e-4)


@pytest.mark.parametrize("prefix", ["mtp.", "language_model.mtp.", "model.language_model.mtp."])
def test_a_makers_checkpoint_is_read_with_its_norms_less_one(tmp_path: Path, prefix: str) -> None:
    """The last one's mean is not below that of the model's even so, as in a head of Qwen3.5."""
    head = write_draft_head(tmp_path, "qwen3_5", raw=True, prefix=prefix, store=as_made, last_norm=2.4)
    np.testing.assert_allclose(states(read(tmp_path)), judge(head), atol=1e-4)


LEGACY = ("q_norm.weight", "k_norm.weight")


@pytest.mark.parametrize("store", [as_made, lambda head: draft_heads.less_one(head, *LEGACY)])
def test_a_converted_checkpoint_may_have_kept_norms_of_its_head_less_one(
    tmp_path: Path, store: Callable[[Tensors], Tensors]
) -> None:
    head = write_draft_head(tmp_path, "qwen3_5", store=store)
    np.testing.assert_allclose(states(read(tmp_path)), judge(head), atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
@pytest.mark.parametrize("layout", ["split_experts", "fuse_experts", "dict"])
def test_experts_are_read_in_every_layout(tmp_path: Path, name: str, layout: str) -> None:
    store = {"dict": dict}.get(layout) or getattr(draft_heads, layout)
    head = write_draft_head(tmp_path, name, raw=True, store=lambda tensors: store(as_made(tensors)))
    np.testing.assert_allclose(states(read(tmp_path)), layer_judge(head, tmp_path), atol=1e-5)


@pytest.mark.parametrize("name", draft_heads.LAST_LAYERS)
def test_one_layer_more_is_read_as_mlx_lm_reads_such_a_layer(tmp_path: Path, name: str) -> None:
    """transformers and vLLM: the projection of both norms, the layer, and `shared_head.norm`."""
    folder = draft_heads.write_last_layer(tmp_path / "model", name)
    config = json.loads((folder / "config.json").read_text())
    model_class, args_class = _get_classes(config)
    whole = model_class(args_class.from_dict(config))
    whole.load_weights(str(folder / "model.safetensors"))
    stored = mx.load(str(tmp_path / "model" / "model.safetensors"))
    stored = {path.partition(f".{len(whole.model.layers) - 1}.")[2]: value for path, value in stored.items()}
    hidden, embeddings = (mx.array(values[None]) for values in INPUTS)
    before = [(embeddings, "enorm.weight"), (hidden, "hnorm.weight")]
    joined = mx.concatenate([mx.fast.rms_norm(values, stored[path], 1e-5) for values, path in before], -1)
    out = whole.model.layers[-1](joined @ stored["eh_proj.weight"].T, mx.tri(TOKENS, dtype=mx.bool_), None)
    wanted = mx.fast.rms_norm(out, stored["shared_head.norm.weight"], 1e-5)
    head = read(tmp_path / "model")
    np.testing.assert_allclose(states(head), np.array(wanted)[0], atol=1e-5)


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_packed_head_stays_packed_beside_packed_layers(tmp_path: Path, dequantize: bool) -> None:
    """One of its matrices has 8 bits, as config.json says, and one is not packed."""

    def bits(path: str) -> int:
        return 8 if path == "fc.weight" else 4

    head = write_draft_head(tmp_path, "qwen3_5", store=lambda tensors: draft_heads.pack(tensors, bits))
    file, embedding = tmp_path / "model.safetensors", "language_model.model.embed_tokens"
    tensors = mx.load(str(file))
    tensors |= draft_heads.pack({f"{embedding}.weight": tensors[f"{embedding}.weight"]}, bits)
    mx.eval(tensors)
    mx.save_safetensors(str(file), tensors, metadata={"format": "mlx"})
    stated = {"group_size": 64, "bits": 3, "mtp.fc": {"group_size": 32, "bits": 8}}
    stated[embedding] = {"group_size": 32, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(RECURRENT["qwen3_5"] | {"quantization": stated}))
    got = read(tmp_path, dequantize=dequantize)
    assert got is not None and type(got.fc) is (nn.Linear if dequantize else nn.QuantizedLinear)
    np.testing.assert_allclose(states(got), judge(draft_heads.rounded(head, bits)), atol=1e-4)
    stated["mtp.fc"] = {"group_size": 32, "bits": 4}
    loaded = load_model(tmp_path)
    with pytest.raises(ModelCorrupt, match=r"mtp\.fc\.weight .* \(32, 16\), but config\.json asks for .* \(32, 8\)"):
        read_draft_head(tmp_path, loaded.config | {"quantization": stated}, loaded.model)


def test_a_head_in_a_shard_of_its_own_has_the_models_dtype(tmp_path: Path) -> None:
    head = write_draft_head(
        tmp_path, "qwen3_5", store=lambda tensors: {p: value.astype(mx.bfloat16) for p, value in tensors.items()}
    )
    draft_heads.split_into_shards(tmp_path)
    got = read(tmp_path)
    assert got is not None and {value.dtype for _, value in tree_flatten(got.parameters())} == {mx.float32}
    np.testing.assert_allclose(states(got), judge({p: v.astype(mx.bfloat16) for p, v in head.items()}), atol=1e-4)


def without(tensors: Tensors, *names: str) -> Tensors:
    return {path: value for path, value in tensors.items() if path not in names}


MLP = "layers.0.mlp"


@pytest.mark.parametrize(
    ("name", "store", "error", "message"),
    [
        ("qwen3_5", lambda t: without(t, "fc.weight", "norm.weight"), ModelCorrupt, r"lacks 2 of 15 .* mtp\.fc"),
        ("qwen3_5", lambda t: t | {"fc.weight": t["fc.weight"].T}, ModelCorrupt, r"\(64, 32\).*\(32, 64\)"),
        ("qwen3_5", lambda t: t | {"fc.weight": t["fc.weight"].astype(mx.uint8)}, ModelCorrupt, "is uint8"),
        ("qwen3_5", lambda t: t | {"fc.scales": mx.zeros((32, 0))}, ModelCorrupt, "packed .* do not fit"),
        ("qwen3_5", lambda t: t | {"layers.1.mlp.x": t["fc.weight"]}, ModelUnsupported, r"1 tensors .* mtp\.layers\.1"),
        ("qwen3_5_moe", lambda t: without(draft_heads.split_experts(t), f"{MLP}.experts.2.up_proj.weight"),
         ModelCorrupt,
         r"\(mtp\.\*\) in .* layers\.0\.mlp\.switch_mlp\.up_proj\.weight of 1 of 4 experts, for example of expert 2"),
        ("qwen3_5_moe", lambda t: draft_heads.split_experts(t) | {f"{MLP}.experts.2.up_proj.weight": mx.zeros((2, 2))},
         ModelCorrupt, r"of the shapes \[\(2, 2\), \(16, 32\)\]"),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, name: str, store: Callable[[Tensors], Tensors], error: type[Exception], message: str
) -> None:
    write_draft_head(tmp_path, name, store=store)
    with pytest.raises(error, match=message):
        read(tmp_path)


def test_a_model_without_a_head_or_of_another_family_has_none(tmp_path: Path) -> None:
    assert read(write_tiny(tmp_path / "none", "qwen3_5")) is None
    write_draft_head(tmp_path / "other", "qwen3_5")
    loaded = load_model(write_tiny(tmp_path / "llama"))
    assert read_draft_head(tmp_path / "other", loaded.config, loaded.model) is None
