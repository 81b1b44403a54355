"""The assistants of Gemma 4: small models that draft tokens from the keys and values of the model that they assist.

An assistant is a folder of its own (`gemma4_assistant`). Its layers have queries only: each attends to what the model's
last layer of its kind (full or windowed) keeps. mlx-lm has no class for it.

transformers' `Gemma4AssistantForCausalLM`, vLLM's `gemma4_mtp` and mlx-vlm's drafter agree on the computation: the
scaled embedding of the newest token comes before the state after the last norm. All tokens of a draft are guessed at
one position, that of this state by vLLM and mlx-vlm. transformers takes the one after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4, gemma4_text

from cortexmlx.errors import ModelUnsupported
from cortexmlx.models import weights as model_weights
from cortexmlx.models.draft_head import check_tensors, quantize_head
from cortexmlx.models.folder import translate_weight_errors
from cortexmlx.models.folder_config import read_config
from cortexmlx.models.safetensors_check import check_weights

_NOT_READ = (".k_proj.", ".v_proj.", ".k_norm.", ".v_norm.", ".rotary_emb.")
"""Parts of the names of tensors that a layer without keys and values has no use for."""


class Assistant(nn.Module):  # type: ignore[misc]
    """A draft model of Gemma 4: from a token's hidden state and the next token, it drafts the tokens that follow.

    `config` is its config.json. `language_model` is the part of the assisted model that computes text. `target_layers`
    are the numbers of the model's layers whose keys and values its layers read.
    """

    def __init__(self, config: Mapping[str, Any], language_model: Any = None) -> None:
        super().__init__()
        args = read_text_args(config)
        self._get_model: Callable[[], Any] = lambda: language_model  # as an attribute, it would be a part of this
        self.target_layers = [] if language_model is None else _find_target_layers(args, language_model)
        backbone = config.get("backbone_hidden_size", 1536)
        self.model = _Layers(args)
        self.pre_projection = nn.Linear(2 * backbone, args.hidden_size, bias=False)
        self.post_projection = nn.Linear(args.hidden_size, backbone, bias=False)
        if not config.get("tie_word_embeddings", True):
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        if config.get("use_ordered_embeddings"):
            self.masked_embedding = _TokenClusters(
                args, config.get("num_centroids", 2048), config.get("centroid_intermediate_top_k", 32)
            )

    def __call__(
        self,
        hidden: mx.array,
        next_embeddings: mx.array,
        positions: mx.array,
        find_keys: Callable[[int], tuple[Any, Any]],
    ) -> tuple[mx.array, mx.array]:
        """Compute one drafted token. Return the states `[T, 1, backbone]` to pass as `hidden` for the token after it,
        and the states `[T, 1, h]` of which `choose` makes the token.

        `hidden` `[T, 1, backbone]` are the assisted model's states after its last norm, at `positions` `[T]`.
        `next_embeddings` `[T, 1, backbone]` are those of the tokens that follow, as `embed` gives them.
        `find_keys(layer)` returns what attention takes as the keys and as the values of a layer of that model.
        """
        states = self.pre_projection(mx.concatenate([next_embeddings, hidden], axis=-1))
        for layer, target in zip(self.model.layers, self.target_layers, strict=True):
            states, _, _ = layer(states, shared_kv=find_keys(target), offset=positions)
        states = self.model.norm(states)
        return self.post_projection(states), states

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(array.nbytes for _, array in tree_flatten(self.parameters()))

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the assisted model's embeddings `[T, backbone]` of tokens `[T]`, scaled as its layers get them."""
        inner = self._get_model().model
        embeddings: mx.array = inner.embed_tokens(tokens) * inner.embed_scale
        return embeddings

    def choose(self, states: mx.array) -> mx.array:
        """Return the likeliest tokens `[T]` of states `[T, 1, h]`."""
        flat = states[:, 0]
        if "masked_embedding" in self:
            tokens: mx.array = self.masked_embedding(flat, self.model.embed_tokens)
            return tokens
        return mx.argmax(self.lm_head(flat) if "lm_head" in self else self.model.embed_tokens.as_linear(flat), axis=-1)


class _Layers(nn.Module):  # type: ignore[misc]
    """The embedding (usually also the output head), the layers and the last norm, named as in the checkpoint."""

    def __init__(self, args: gemma4_text.ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [gemma4_text.DecoderLayer(args, layer_idx=index) for index in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class _TokenClusters(nn.Module):  # type: ignore[misc]
    """An output head that computes only the logits of the tokens in the likeliest clusters of the vocabulary."""

    def __init__(self, args: gemma4_text.ModelArgs, clusters: int, likeliest: int) -> None:
        super().__init__()
        if not 0 < likeliest <= clusters or args.vocab_size % clusters:
            raise ModelUnsupported(
                f"an assistant with {args.vocab_size:,} tokens in {clusters:,} clusters, of which it looks at "
                f"{likeliest:,}: is it damaged?"
            )
        self._likeliest = likeliest
        self.centroids = nn.Linear(args.hidden_size, clusters, bias=False)
        self.token_ordering = mx.zeros((args.vocab_size,), mx.int32)

    def __call__(self, states: mx.array, embed_tokens: nn.Module) -> mx.array:
        """Return the likeliest tokens `[T]` of states `[T, h]`."""
        scores = self.centroids(states)
        best = mx.argpartition(scores, kth=-self._likeliest, axis=-1)[:, -self._likeliest :]
        clusters = self.token_ordering.reshape(scores.shape[-1], -1)
        tokens = clusters[best].reshape(len(states), -1)
        logits = (embed_tokens(tokens) @ states[:, :, None])[:, :, 0]
        return mx.take_along_axis(tokens, mx.argmax(logits, axis=-1)[:, None], axis=-1)[:, 0]


def read_text_args(config: Mapping[str, Any]) -> gemma4_text.ModelArgs:
    """Return the settings of an assistant's layers, which all read keys and values of the model's layers."""
    try:
        args = gemma4_text.ModelArgs.from_dict(dict(config.get("text_config") or {}))
        args.num_kv_shared_layers = args.num_hidden_layers
        layer_types = args.layer_types[: args.num_hidden_layers]
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelUnsupported(
            f"the assistant's config.json has a text_config that is not understood: {error}"
        ) from error
    if len(layer_types) < args.num_hidden_layers or args.enable_moe_block or args.hidden_size_per_layer_input:
        raise ModelUnsupported(
            f"an assistant with {len(layer_types)} layer types for {args.num_hidden_layers} layers, experts "
            f"({args.enable_moe_block}) or inputs per layer ({args.hidden_size_per_layer_input}) is not known"
        )
    return args


def read_assistant(folder: Path, model: nn.Module) -> Assistant:
    """Read the assistant in `folder` for a loaded model, and evaluate it on this thread. It gets the model's dtype.

    Raises ModelUnsupported if it is not one for this model. Raises ModelCorrupt if tensors are missing, damaged or of
    other shapes.
    """
    config = read_config(folder)
    language_model = _language_model(model)
    if language_model is None:
        raise ModelUnsupported(f"{folder} is an assistant for models of Gemma 4, and this one is none: choose another")
    args, wanted = read_text_args(config), language_model.args
    own = config.get("backbone_hidden_size", 1536), args.vocab_size
    if own != (wanted.hidden_size, wanted.vocab_size):
        raise ModelUnsupported(
            f"the assistant in {folder} is for a model of width {own[0]:,} with {own[1]:,} tokens, but this one has "
            f"{wanted.hidden_size:,} and {wanted.vocab_size:,}: take the assistant of the same size"
        )
    files = {
        name: file
        for name, file in check_weights(folder).items()
        if not any(part in name for part in _NOT_READ)
        and (name != "lm_head.weight" or not config.get("tie_word_embeddings", True))
    }
    with translate_weight_errors(folder):
        arrays: dict[Path, Any] = {file: mx.load(str(file)) for file in set(files.values())}
        tensors = {name: arrays[file][name] for name, file in files.items()}
        ordering = "masked_embedding.token_ordering"
        if ordering in tensors:
            tensors[ordering] = tensors[ordering].astype(mx.int32)
        assistant = Assistant(config, language_model)
        quantize_head(folder, assistant, tensors, config.get("quantization") or {}, "")
        check_tensors(folder, assistant, tensors, "")
        assistant.load_weights(list(tensors.items()))
        assistant.set_dtype(language_model.layers[0].input_layernorm.weight.dtype)
        if not model_weights.is_quantized(model):
            model_weights.dequantize_layers(assistant)
        mx.eval(mx.random.state, assistant.parameters())  # the state: see `load._evaluate`
    return assistant


def _language_model(model: nn.Module) -> Any:
    """Return the part of a model of Gemma 4 that computes text; None for another model, or a derived class."""
    if type(model) is gemma4.Model:
        model = model.language_model
    return model if type(model) is gemma4_text.Model else None


def _find_target_layers(args: gemma4_text.ModelArgs, language_model: Any) -> list[int]:
    """Return, for each layer of an assistant, the model's last layer of the same kind with its own keys and values."""
    wanted = language_model.args
    own_layers = wanted.layer_types[: wanted.num_hidden_layers - wanted.num_kv_shared_layers]
    last = {kind: index for index, kind in enumerate(own_layers)}
    targets = []
    for index in range(args.num_hidden_layers):
        kind = args.layer_types[index]
        target = language_model.layers[last[kind]].self_attn if kind in last else None
        head_dim = args.global_head_dim if kind == "full_attention" and args.global_head_dim else args.head_dim
        if target is None or target.head_dim != head_dim or args.num_attention_heads % target.n_kv_heads:
            kept = "none" if target is None else f"{target.n_kv_heads} heads of {target.head_dim}"
            raise ModelUnsupported(
                f"layer {index} of the assistant ({kind}) reads keys with {args.num_attention_heads} heads of "
                f"{head_dim}, but the model has {kept}: take the assistant of the same model"
            )
        targets.append(last[kind])
    return targets
