"""Draft heads: the layer for multi-token prediction (MTP) in the checkpoints of Qwen3-Next, Qwen3.5 and Qwen3.6, and of
GLM-4.5 to 4.7 and DeepSeek V3.

mlx-lm's classes drop its tensors: `mtp.*`, or those of one layer more than the model has. They are read from the weight
files here, beside a loaded model.

transformers' `MtpLayer` and vLLM's `glm4_moe_mtp` and `deepseek_mtp` agree on what the last layer computes from a
token's state. For the tokens after that, vLLM gives it its state before `shared_head.norm`, and transformers the one
after it, as here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v3, glm4_moe, glm4_moe_lite, qwen3_5, qwen3_5_moe, qwen3_next
from mlx_lm.models.base import create_attention_mask

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.mlx_lm.package import import_mlx_lm_utils
from cortexmlx.models import weights as model_weights
from cortexmlx.models.folder import stack_experts, translate_weight_errors
from cortexmlx.models.folder_config import LAST_LAYER_MODELS, head_prefix
from cortexmlx.models.safetensors_check import find_tensors, read_safetensors_header
from cortexmlx.types.arrays import dtype_name

_LAST_LAYERS: dict[type, Callable[..., nn.Module]] = {
    deepseek_v3.Model: deepseek_v3.DeepseekV3DecoderLayer,
    glm4_moe.Model: glm4_moe.DecoderLayer,
    glm4_moe_lite.Model: glm4_moe_lite.Glm4MoeLiteDecoderLayer,
}
"""The classes of layers by those of models whose head is one more of them."""

_OWN_PARTS = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
"""What such a checkpoint calls the parts of the head around the layer."""

_FLOAT32 = "e_score_correction_bias"
"""How the name of a tensor ends that stays float32: sums of it choose experts."""

_MISSING_ONE = 0.25
"""How far the mean of a head's norm lies below that of the model's norms if it is stored as weight - 1.

Other programs' authors measured 0.44 and more for such norms of Qwen3.6, and 0.1 at most for converted ones.
"""


class DraftHead(nn.Module):  # type: ignore[misc]
    """Proposes the token after next, from a token's hidden state and the embedding of its next token.

    `layer` is a decoder layer of the model's class. What it keeps of a token is as what layer `like_layer` of the model
    keeps. The embedding and the output head are those of the `language_model`.
    """

    def __init__(self, layer: nn.Module, language_model: Any, like_layer: int) -> None:
        super().__init__()
        self._get_model: Callable[[], Any] = lambda: language_model  # as an attribute, it would be a part of the head
        self.like_layer = like_layer
        size, eps = language_model.args.hidden_size, language_model.args.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(size, eps=eps)

    def __call__(self, hidden: mx.array, next_embeddings: mx.array, cache: Any = None) -> mx.array:
        """Return the head's states, in the shape of `hidden`. The model's output head makes logits of them.

        `hidden` `[T, 1, h]` are the model's hidden states after its last norm: what its output head gets. A state that
        this method returned takes their place for the token after.
        `next_embeddings` `[T, 1, h]` are the embeddings of the tokens that follow.
        `cache` is what an attention layer of mlx-lm gets. The head has keys and values of its own for every token, at
        the position of the token of `hidden`. With mlx-lm's own caches, the shapes are `[rows, tokens, h]`.
        """
        inputs = [self.pre_fc_norm_embedding(next_embeddings), self.pre_fc_norm_hidden(hidden)]
        states = self.fc(mx.concatenate(inputs, axis=-1))
        states = self.layers[0](states, create_attention_mask(states, cache, return_array=True), cache)
        normed: mx.array = self.norm(states)
        return normed

    @property
    def model_dtype(self) -> mx.Dtype:
        """The type that the model computes with."""
        dtype: mx.Dtype = self._get_model().layers[0].input_layernorm.weight.dtype
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(array.nbytes for _, array in tree_flatten(self.parameters()))

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the model's embeddings `[T, h]` of tokens `[T]`."""
        embeddings: mx.array = self._get_model().model.embed_tokens(tokens)
        return embeddings

    def project(self, states: mx.array) -> mx.array:
        """Return the logits `[T, 1, vocab]` that the model's output head makes of states `[T, 1, h]`."""
        model = self._get_model()
        tied = getattr(model.args, "tie_word_embeddings", False)
        logits: mx.array = model.model.embed_tokens.as_linear(states) if tied else model.lm_head(states)
        return logits


def read_draft_head(folder: Path, config: Mapping[str, Any], model: nn.Module) -> DraftHead | None:
    """Read the draft head in `folder`, whose config.json is `config`, and evaluate it on this thread. The folder is
    that of `model`, or has another checkpoint of it, perhaps only the files with the head. Return None if they have
    none, or if no head is known for the class of `model`.

    The head gets the model's dtype. Its layers stay packed if the model has packed layers.

    Raises ModelCorrupt if tensors of the head are missing, damaged or of other shapes. Raises ModelUnsupported for a
    head with more layers, or with weights that were quantized in another way than MLX's.
    """
    head, prefix = make_draft_head(model), head_prefix(config)
    if head is None or prefix is None:
        return None
    head_tensors = find_tensors(folder, lambda name: prefix.match(name) is not None)
    if not head_tensors:
        return None
    with translate_weight_errors(folder):
        arrays: dict[Path, Any] = {file: mx.load(str(file)) for file in set(head_tensors.values())}
        weights = {prefix.sub("", name, count=1): arrays[file][name] for name, file in head_tensors.items()}
        is_last_layer = config["model_type"] in LAST_LAYER_MODELS
        if is_last_layer:
            weights = _convert_last_layer(folder, weights, model)
        else:
            count = getattr(model, "language_model", model).args.num_experts
            weights = stack_experts(_split_gate_up(weights), f"the draft head (mtp.*) in {folder}", count)
        quantize_head(folder, head, weights, config.get("quantization") or {})
        check_tensors(folder, head, weights)
        if not is_last_layer:
            _add_missing_ones(head, weights, model, is_unconverted=_is_unconverted(folder))
        head.load_weights(list(weights.items()))
        head.set_dtype(head.model_dtype)
        head.load_weights([(name, weights[name]) for name in weights if name.endswith(_FLOAT32)], strict=False)
        if not model_weights.is_quantized(model):
            model_weights.dequantize_layers(head)
        mx.eval(mx.random.state, head.parameters())  # the state: see `load._evaluate`
    return head


def make_draft_head(model: nn.Module) -> DraftHead | None:
    """Return a draft head, without weights, for a model of exactly a known class; None for any other model."""
    if type(model) in _LAST_LAYERS:
        return DraftHead(_LAST_LAYERS[type(model)](model.args, model.args.num_hidden_layers), model, 0)
    layer_class: Callable[..., nn.Module]
    if type(model) is qwen3_next.Model:
        language_model, layer_class = model, qwen3_next.Qwen3NextDecoderLayer
    elif type(model) in (qwen3_5.Model, qwen3_5_moe.Model):
        language_model, layer_class = model.language_model, qwen3_5.DecoderLayer
    else:
        return None
    args = language_model.args
    layer = layer_class(replace(args, full_attention_interval=1), layer_idx=0)
    return DraftHead(layer, language_model, args.full_attention_interval - 1)


def _convert_last_layer(folder: Path, weights: Mapping[str, mx.array], model: nn.Module) -> dict[str, mx.array]:
    """Return the extra last layer's tensors with a `DraftHead`'s names, in the layout of mlx-lm's layers. Copies of the
    model's embedding and output head are left out.
    """
    before, layer, converted = f"model.layers.{model.args.num_hidden_layers - 1}.", {}, {}
    for name, value in weights.items():
        part, _, end = name.rpartition(".")
        if part in _OWN_PARTS:
            converted[f"{_OWN_PARTS[part]}.{end}"] = value
        elif part not in ("embed_tokens", "shared_head.head"):
            layer[before + name] = value
    try:
        layer = model.sanitize(layer)
    except KeyError as error:
        raise ModelCorrupt(f"the draft head in {folder} lacks {error}. Download the model again.") from error
    return converted | {f"layers.0.{name.removeprefix(before)}": value for name, value in layer.items()}


def _split_gate_up(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Split each fused `gate_up_proj` of stacked experts into two tensors, and name them as mlx-lm's `SwitchGLU` does.
    Return all tensors.
    """
    split: dict[str, mx.array] = {}
    for name, value in weights.items():
        mlp, _, part = name.partition(".experts.")
        if part == "gate_up_proj" and value.ndim == 3:
            middle = value.shape[1] // 2
            split[f"{mlp}.switch_mlp.gate_proj.weight"] = value[:, :middle]
            split[f"{mlp}.switch_mlp.up_proj.weight"] = value[:, middle:]
        elif part == "down_proj":
            split[f"{mlp}.switch_mlp.down_proj.weight"] = value
        else:
            split[name] = value
    return split


def quantize_head(
    folder: Path, head: nn.Module, weights: Mapping[str, mx.array], settings: Mapping[str, Any], prefix: str = "mtp."
) -> None:
    """Put quantized layers in the place of those layers of `head` whose `weights` are packed. Their bits and group
    sizes come from `settings`, where names begin with `prefix`, or else from the shapes. Raises ModelCorrupt.
    """
    infer_settings = import_mlx_lm_utils().infer_quant_config

    def layer_settings(path: str, layer: nn.Module) -> Any:
        if not hasattr(layer, "to_quantized") or not {f"{path}.scales", f"{path}.weight"} <= weights.keys():
            return False
        stated = [value for name, value in settings.items() if f".{name}".endswith(f".{prefix}{path}")]
        return stated[0] if stated and isinstance(stated[0], dict) else infer_settings(path, layer, weights)

    try:
        nn.quantize(head, class_predicate=layer_settings)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ModelCorrupt(
            f"the packed {prefix}* in {folder} do not fit: {error}. Download the model again."
        ) from error


def check_tensors(
    folder: Path, head: nn.Module, weights: Mapping[str, mx.array], prefix: str = "mtp.", part: str = "draft head"
) -> None:
    """Raise ModelUnsupported or ModelCorrupt unless `weights` are exactly the head's tensors, in their shapes. In
    messages, `prefix` comes before a tensor's name, and `part` is what the head is called.
    """
    expected = dict(tree_flatten(head.parameters()))
    if unknown := sorted(weights.keys() - expected.keys()):
        raise ModelUnsupported(
            f"the {part} in {folder} has {len(unknown)} tensors that are not read, for example {prefix}{unknown[0]}. A "
            "head of one layer, an assistant and a vision tower are read plain or packed by MLX: take such a one."
        )
    if missing := sorted(expected.keys() - weights.keys()):
        raise ModelCorrupt(
            f"the {part} in {folder} lacks {len(missing)} of {len(expected)} tensors, for example "
            f"{prefix}{missing[0]}. Download the model again."
        )
    for name, wanted in expected.items():
        value = weights[name]
        is_float, wants_float = (mx.issubdtype(array.dtype, mx.floating) for array in (value, wanted))
        if value.shape != wanted.shape or is_float != wants_float:
            raise ModelCorrupt(
                f"{prefix}{name} in {folder} is {dtype_name(value.dtype)} {value.shape}, but config.json asks for "
                f"{dtype_name(wanted.dtype)} {wanted.shape}: the two may be of different models. Download them again."
            )


def _is_unconverted(folder: Path) -> bool:
    """Return whether the weights are in PyTorch's layout, which mlx-lm recognizes by the axes of convolutions. Files
    without any convolution count as converted.
    """
    for file in sorted(folder.glob("model*.safetensors")):
        for name, entry in read_safetensors_header(file).items():
            if name.endswith("conv1d.weight"):
                return bool(entry["shape"][-1:] != [1])
    return False


def _add_missing_ones(head: DraftHead, weights: dict[str, mx.array], model: nn.Module, *, is_unconverted: bool) -> None:
    """Add 1 to the norms that are stored as weight - 1.

    All are in an unconverted checkpoint. Converters have kept heads with all, some or none of them converted, so there
    each norm is compared with the model's of the same name. Those before `fc` have no such norm, and their means tell
    nothing (0.3 to 0.5 when converted). They are treated as the layer's first norm is.

    A wrong guess changes proposals, and so how many are accepted. It changes no answer.
    """
    model_norms = [(path, value) for path, value in tree_flatten(model.parameters()) if path.endswith("norm.weight")]
    first = "layers.0.input_layernorm.weight"

    def lacks_one(name: str) -> bool:
        suffix = "model.norm.weight" if name == "norm.weight" else name.removeprefix("layers.0")
        means = [_mean(value) for path, value in model_norms if path.endswith(suffix)]
        if not means:
            return name != first and lacks_one(first)
        return _mean(weights[name]) < sum(means) / len(means) - _MISSING_ONE

    norms = [f"{path}.weight" for path, layer in head.named_modules() if isinstance(layer, nn.RMSNorm)]
    for name in [name for name in norms if is_unconverted or lacks_one(name)]:
        weights[name] = weights[name].astype(mx.float32) + 1


def _mean(values: mx.array) -> float:
    """Return the mean of the values, in float32."""
    return float(np.array(values.astype(mx.float32)).mean())
