"""Load a GGUF file into mlx-lm's own model class. Its quantized layers stay quantized where MLX has their groups.

Besides reading tensors, this names them and undoes two changes that converters make for other programs: the row order
of the query and key projections of the llama architecture, and the 1 that is added to Gemma's norms.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.models.gguf.config import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    Architecture,
    ModelDescription,
    ModelDimensions,
    OutputHead,
    activation_type,
    describe_model,
)
from cortexmlx.models.gguf.file import GGUFHeader, read_model_header
from cortexmlx.models.gguf.tensors import FLOATS, GROUP_SIZE, READ_TYPES, UNPACKED_TYPES, PackedArrays, TensorFiles
from cortexmlx.models.gguf.tokenizer import build_tokenizer
from cortexmlx.models.messages import one_line
from cortexmlx.models.tokenizers import templates
from cortexmlx.models.tokenizers.base import Tokenizer
from cortexmlx.types.arrays import dtype_name


def load_gguf(path: Path, float32: bool = False) -> tuple[Any, Tokenizer, dict[str, Any], tuple[str, ...]]:
    """Return the model, tokenizer, config and notes of the GGUF file at `path`. Weights are evaluated on this thread.

    `path` is the first file if a model is split into several. With `float32`, activations, scales and all other numbers
    are float32, but packed weights stay packed. Otherwise they have the type of `activation_type`.

    Raises ModelCorrupt for a damaged file. Raises ModelUnsupported for a tensor type, architecture or pre-tokenizer
    that is not served. Both are raised before any tensor is read.
    """
    header = read_model_header(path)
    description = describe_model(header)
    names, tokenizer, config, notes = _read_names_and_tokenizer(header, description)
    import_thread = templates.import_renderer_in_background() if tokenizer.has_chat_template else None
    dtype: mx.Dtype = mx.float32 if float32 else getattr(mx, activation_type(header, description))
    try:
        model = _build_model(header, description, names, dtype)
    finally:
        if import_thread is not None:
            import_thread.join()
    return model, tokenizer, config, (*notes, *_note_unpacked_tensors(header, dtype))


def load_gguf_without_weights(path: Path) -> tuple[Tokenizer, dict[str, Any], tuple[str, ...]]:
    """Return tokenizer, config and notes of `load_gguf`. No tensor is read. Raises what `load_gguf` raises."""
    header = read_model_header(path)
    _, tokenizer, config, notes = _read_names_and_tokenizer(header, describe_model(header))
    return tokenizer, config, notes


def _read_names_and_tokenizer(
    header: GGUFHeader, description: ModelDescription
) -> tuple[dict[str, str], Tokenizer, dict[str, Any], tuple[str, ...]]:
    """Check the tensors' types. Return the parameter name of each tensor, the tokenizer, config and notes."""
    check_tensor_types(header)
    names = map_parameter_names(header, description)
    tokenizer, notes = build_tokenizer(header, description.sizes.vocabulary)
    config = description.config | {"eos_token_id": sorted(tokenizer.eos_token_ids)}
    return names, tokenizer, config, (*description.notes, *notes)


def check_tensor_types(header: GGUFHeader) -> None:
    """Raise ModelUnsupported for tensors of types that cannot be read, and for a quantized tensor that is no matrix."""
    unsupported_counts = Counter(info.type_name for info in header.tensors.values() if info.type_name not in READ_TYPES)
    if unsupported_counts:
        counts_text = ", ".join(f"{count} of type {name}" for name, count in sorted(unsupported_counts.items()))
        first = next(info.name for info in header.tensors.values() if info.type_name in unsupported_counts)
        raise ModelUnsupported(
            f"{header.path.name} holds tensors that are not read here: {counts_text} (for example {first!r}). "
            "Take a file of Q4_K_M, Q5_K_M, Q6_K, Q8_0 or BF16."
        )
    for info in header.tensors.values():
        if info.type_name not in FLOATS and (len(info.shape) == 1 or not info.name.endswith(".weight")):
            raise ModelUnsupported(f"{header.path.name}: {info.name!r} is quantized, which it cannot be here.")


def _note_unpacked_tensors(header: GGUFHeader, dtype: mx.Dtype) -> tuple[str, ...]:
    """Return a note on the tensors that are unpacked in memory, because MLX has no packed form of their type."""
    unpacked_tensors = [info for info in header.tensors.values() if info.type_name in UNPACKED_TYPES]
    if not unpacked_tensors:
        return ()
    kinds = ", ".join(sorted({info.type_name for info in unpacked_tensors}))
    stored_size = sum(info.nbytes for info in unpacked_tensors)
    memory_size = sum(info.element_count for info in unpacked_tensors) * dtype.size
    return (
        f"MLX has no packed form of {kinds}: {len(unpacked_tensors)} tensors are {dtype_name(dtype)} in memory "
        f"({format_bytes(memory_size)} instead of {format_bytes(stored_size)})",
    )


def _build_model(header: GGUFHeader, description: ModelDescription, names: dict[str, str], dtype: mx.Dtype) -> Any:
    """Build mlx-lm's model and load the file's tensors into it, packed where MLX can compute with them."""
    files = TensorFiles()
    weights: dict[str, mx.array] = {}
    packed: dict[str, PackedArrays] = {}
    for parameter, value in _read_parameters(header, description, names, dtype, files):
        if isinstance(value, PackedArrays):
            module = parameter.removesuffix(".weight")
            packed[module] = value
            weights |= {parameter: value.weight, f"{module}.scales": value.scales}
            if value.biases is not None:
                weights[f"{module}.biases"] = value.biases
        else:
            weights[parameter] = value
    arch = importlib.import_module(f"mlx_lm.models.{description.architecture.model_type}")
    try:
        model = arch.Model(arch.ModelArgs.from_dict(description.config))
    except (ArithmeticError, ValueError, RuntimeError) as error:  # numbers that no model has, such as a base of 1
        raise ModelCorrupt(f"{header.path.name} describes no model: {one_line(error)}") from error
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    _replace_packed_layers(header, model, packed, dtype)
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise ModelCorrupt(f"{header.path.name}: tensors and metadata do not fit: {one_line(error)}") from error
    if ROPE_FACTORS in header.tensors:
        _apply_rope_factors(header, model, description.config, files)
    model.eval()
    mx.eval(model.parameters())
    return model


def _read_parameters(
    header: GGUFHeader, description: ModelDescription, names: dict[str, str], dtype: mx.Dtype, files: TensorFiles
) -> Iterator[tuple[str, Any]]:
    """Yield each parameter of the model as its path and its array, converted to the row order of mlx-lm."""
    architecture = description.architecture
    for tensor, parameter in names.items():
        info = header.tensors[tensor]
        if architecture.norm_offset and tensor.endswith("norm.weight"):
            yield parameter, (files.read(info, mx.float32) - architecture.norm_offset).astype(dtype)
            continue
        value = files.read(info, dtype, _row_order(tensor, description) if architecture.is_interleaved else None)
        yield parameter, value[None] if tensor.endswith("ffn_gate_inp_shexp.weight") else value


def _replace_packed_layers(header: GGUFHeader, model: Any, packed: dict[str, PackedArrays], dtype: mx.Dtype) -> None:
    """Put quantized layers in the places of the layers whose weights are packed."""
    packed_layers = []
    for path, layer in model.named_modules():
        if path in packed:
            packed_layer = make_packed_layer(layer, packed[path], dtype)
            if packed_layer is None:
                raise ModelUnsupported(f"{header.path.name}: {path!r} is quantized, which it cannot be here.")
            packed_layers.append((path, packed_layer))
    model.update_modules(tree_unflatten(packed_layers))


def _row_order(tensor: str, description: ModelDescription) -> list[int] | None:
    """Return, for each row of the model, the row of the file that belongs there; None if they are in the same order.

    Converters interleave the two halves of each head of llama's query and key projections. Then a rotation of
    neighbouring pairs does what the original rotation of halves does. The models here rotate halves.
    """
    kind = tensor.split(".")[-2]
    if kind not in ("attn_q", "attn_k"):
        return None
    heads = description.sizes.heads if kind == "attn_q" else description.sizes.kv_heads
    dim = description.sizes.head_dim
    return [head * dim + pair * 2 + half for head in range(heads) for half in (0, 1) for pair in range(dim // 2)]


def _apply_rope_factors(header: GGUFHeader, model: Any, config: dict[str, Any], files: TensorFiles) -> None:
    """Multiply each layer's rope wavelengths by the file's factors, which is how Llama 3.1's scaling is stored."""
    from mlx_lm.models.rope_utils import Llama3RoPE

    dim, info = config["head_dim"], header.tensors[ROPE_FACTORS]
    if info.shape != (dim // 2,):
        raise ModelCorrupt(f"{header.path.name}: the rope factors have shape {info.shape}, not ({dim // 2},).")
    factors = files.read(info, mx.float32)
    if not mx.all(mx.isfinite(factors) & (factors > 0)).item():
        raise ModelCorrupt(f"{header.path.name}: a rope factor is no positive number. Download the file again.")
    wavelengths = config["rope_theta"] ** (mx.arange(0, dim, 2, dtype=mx.float32) / dim)
    scaled_wavelengths = wavelengths * factors
    context = config["max_position_embeddings"]
    rope = Llama3RoPE(dim, context, False, config["rope_theta"], {"factor": 1.0})
    rope._freqs = scaled_wavelengths
    mx.eval(scaled_wavelengths)
    for layer in model.layers:
        layer.self_attn.rope = rope


# The names of a GGUF file's tensors in the model, and the shapes that the configuration gives them.
#
# They are checked before a model is built. So contradictory metadata ends in one clear line, not in a huge allocation.


_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)", re.ASCII)
_ROPE_TENSORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)


def map_parameter_names(header: GGUFHeader, description: ModelDescription) -> dict[str, str]:
    """Return the model's parameter for each tensor: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    Raises ModelUnsupported for a tensor that the architecture does not have here. Raises ModelCorrupt for a missing
    tensor, or one whose shape differs from the configuration.
    """
    architecture = description.architecture
    shapes = _weight_shapes(description.sizes, architecture)
    global_names = dict(_GLOBAL_NAMES)
    if architecture.head is OutputHead.TIED:
        del global_names["output"]
    _check_no_missing_tensors(header, description)
    names: dict[str, str] = {}
    for tensor, info in header.tensors.items():
        if tensor in _ROPE_TENSORS:
            continue
        stem, _, kind = tensor.rpartition(".")
        layer = _LAYER_TENSOR.fullmatch(stem)
        part = layer[2] if layer else stem
        module_names = architecture.modules if layer else global_names
        if kind not in ("weight", "bias") or part not in module_names:
            raise ModelUnsupported(
                f"{header.path.name} has a tensor {tensor!r} that {architecture.model_type} models do not have."
            )
        expected_shape = shapes[part] if kind == "weight" else shapes[part][:-1]
        if info.shape != expected_shape:
            raise ModelCorrupt(
                f"{header.path.name}: tensor {tensor!r} has the shape {info.shape}, not {expected_shape}."
            )
        prefix = f"model.layers.{int(layer[1])}." if layer else ""
        names[tensor] = prefix + _parameter_name(module_names[part], kind)
    return names


def _parameter_name(module: str, kind: str) -> str:
    """Return the name of a module's parameter of a `kind` such as "weight". Attention sinks have no kind."""
    return module if module.endswith(".sinks") else f"{module}.{kind}"


def _weight_shapes(sizes: ModelDimensions, architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight that a model of these dimensions may have, by GGUF's name without the layer."""
    hidden, feed_forward = sizes.hidden, sizes.feed_forward
    gate_and_up = feed_forward if "ffn_gate" in architecture.modules else 2 * feed_forward
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    experts, expert, shared = sizes.experts, sizes.expert_feed_forward, sizes.shared_feed_forward
    return {
        "token_embd": (sizes.vocabulary, hidden),
        "output": (sizes.vocabulary, hidden),
        "output_norm": (hidden,),
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
        "post_attention_norm": (hidden,),
        "post_ffw_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_qkv": (queries + 2 * keys, hidden),
        "attn_output": (hidden, queries),
        "attn_q_norm": (sizes.head_dim,),
        "attn_k_norm": (sizes.head_dim,),
        "attn_sinks": (sizes.heads,),
        "ffn_gate": (feed_forward, hidden),
        "ffn_up": (gate_and_up, hidden),
        "ffn_down": (hidden, feed_forward),
        "ffn_gate_inp": (experts, hidden),
        "ffn_gate_exps": (experts, expert, hidden),
        "ffn_up_exps": (experts, expert, hidden),
        "ffn_down_exps": (experts, hidden, expert),
        "ffn_gate_inp_shexp": (hidden,),
        "ffn_gate_shexp": (shared, hidden),
        "ffn_up_shexp": (shared, hidden),
        "ffn_down_shexp": (hidden, shared),
    }


def _check_no_missing_tensors(header: GGUFHeader, description: ModelDescription) -> None:
    """Raise ModelCorrupt if a layer, or a tensor that the architecture needs, is missing."""
    architecture, layers = description.architecture, description.sizes.layers
    layer_numbers = {int(match[1]) for name in header.tensors if (match := _LAYER_TENSOR.match(name))}
    if len(layer_numbers) != layers or max(layer_numbers) != layers - 1:
        raise ModelCorrupt(f"{header.path.name} says it has {layers} layers and holds tensors of {len(layer_numbers)}.")
    required = ["token_embd", "output_norm", *(["output"] if architecture.head is OutputHead.OWN else [])]
    required += [f"blk.{layer}.{part}" for layer in range(layers) for part in architecture.modules]
    missing = [part for part in required if f"{part}.weight" not in header.tensors]
    if missing:
        raise ModelCorrupt(f"{header.path.name} lacks {len(missing)} tensors, for example {missing[0]!r}.")


# Quantized layers whose scales are finer than the activations. They compute in float32, and return the activations'
# type.
#
# The scale of a group in Q4_K and Q5_K is a product of 17 bits. Neither float16 nor bfloat16 holds it. MLX multiplies
# in the wider of two types and returns that type. Then the whole model would be float32, and its KV cache too.


class CastingLinear(nn.QuantizedLinear):  # type: ignore[misc]
    """A quantized linear layer with float32 scales that casts its result to its input's type."""

    def __call__(self, x: mx.array) -> mx.array:
        answer: mx.array = super().__call__(x)
        return answer.astype(x.dtype)


class CastingSwitchLinear(QuantizedSwitchLinear):  # type: ignore[misc]
    """A quantized linear layer of many experts with float32 scales that casts its result to its input's type."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        answer: mx.array = super().__call__(x, indices, sorted_indices=sorted_indices)
        return answer.astype(x.dtype)


class CastingEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """A quantized embedding with float32 scales. Casts vectors to `dtype`; as output projection, to the input type."""

    dtype: mx.Dtype

    def __call__(self, x: mx.array) -> mx.array:
        vectors: mx.array = super().__call__(x)
        return vectors.astype(self.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """Compute the output projection, in the input's type."""
        answer: mx.array = super().as_linear(x)
        return answer.astype(x.dtype)


def make_packed_layer(layer: Any, arrays: PackedArrays, dtype: mx.Dtype) -> Any:
    """Return a quantized layer to replace `layer`; None if `layer` is of a kind that cannot be quantized here. The
    parameters are loaded later.

    `dtype` is the type of the activations. Nothing is computed: the weights that the constructors draw are never
    evaluated.
    """
    has_finer_scales = arrays.scales.dtype not in (dtype, mx.uint8)
    quantization = {"group_size": GROUP_SIZE, "bits": arrays.bits, "mode": arrays.mode}
    if isinstance(layer, nn.Linear):
        rows, columns = layer.weight.shape
        linear = CastingLinear if has_finer_scales else nn.QuantizedLinear
        return linear(columns, rows, "bias" in layer, **quantization)
    if isinstance(layer, SwitchLinear):
        experts, rows, columns = layer.weight.shape
        switch = CastingSwitchLinear if has_finer_scales else QuantizedSwitchLinear
        return switch(columns, rows, experts, "bias" in layer, **quantization)
    if isinstance(layer, nn.Embedding):
        if not has_finer_scales:
            return nn.QuantizedEmbedding(*layer.weight.shape, **quantization)
        embedding = CastingEmbedding(*layer.weight.shape, **quantization)
        embedding.dtype = dtype
        return embedding
    return None
