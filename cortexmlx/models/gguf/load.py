"""A GGUF file into mlx-lm's own model class, its quantized layers staying quantized.

MLX's loader reads the tensor types below and hands out packed weights with scales and biases, which are exactly the
parameters of MLX's quantized layers (groups of 32): nothing is rounded again. What is left to do is naming, and
undoing the row order in which converters store the query and key projections of the llama architecture.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models.gguf.config import model_config
from cortexmlx.models.gguf.file import GGUFHeader, read_header
from cortexmlx.models.gguf.layout import ROPE_FACTORS, parameter_names
from cortexmlx.models.gguf.tokenizer import build_tokenizer
from cortexmlx.models.messages import one_line
from cortexmlx.models.tokenizers import templates
from cortexmlx.models.tokenizers.base import Tokenizer

GROUP_SIZE = 32
QUANTIZED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
FLOAT_TYPES = ("F32", "F16", "BF16")


def load_gguf(path: Path, float32: bool = False) -> tuple[Any, Tokenizer, dict[str, Any], tuple[str, ...]]:
    """Model, tokenizer, config and notes of the GGUF file at `path`; weights are evaluated on this thread.

    `float32`: activations, scales and vectors in float32 (packed weights stay packed), else in the type of the
    matrices. Raises ModelCorrupt for a damaged file and ModelUnsupported for a tensor type, architecture or
    pre-tokenizer that is not served, both before any tensor is read.
    """
    header = read_header(path)
    config = model_config(header)
    _check_tensor_types(header)
    names = parameter_names(header, config)
    tokenizer, notes = build_tokenizer(header, config["vocab_size"])
    preparing = templates.prepare() if tokenizer.has_chat_template else None
    config["eos_token_id"] = sorted(tokenizer.eos_token_ids)
    try:
        return _build_model(header, config, names, float32), tokenizer, config, notes
    finally:
        if preparing is not None:
            preparing.join()


def _check_tensor_types(header: GGUFHeader) -> None:
    served = {*QUANTIZED_BITS, *FLOAT_TYPES}
    refused = {info.type_name: name for name, info in header.tensors.items() if info.type_name not in served}
    if refused:
        types = ", ".join(sorted(refused))
        raise ModelUnsupported(
            f"{header.path.name} holds tensors of type {types} (for example {next(iter(refused.values()))!r}); "
            f"{', '.join(sorted(served))} are read. Take a file quantized to Q4_0, Q4_1 or Q8_0."
        )


def _build_model(header: GGUFHeader, config: dict[str, Any], names: dict[str, str], float32: bool) -> Any:
    arch = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = arch.Model(arch.ModelArgs.from_dict(config))
    try:
        arrays = cast("dict[str, mx.array]", mx.load(str(header.path)))
    except RuntimeError as error:
        raise ModelCorrupt(f"{header.path.name} cannot be read: {one_line(error)}") from error
    bits = _quantized_modules(header, names)
    nn.quantize(model, class_predicate=lambda path, _: path in bits and {"group_size": GROUP_SIZE, "bits": bits[path]})
    dtype = mx.float32 if float32 else _matrix_dtype(header)
    try:
        model.load_weights(list(_parameters(header, config, names, arrays, dtype)), strict=True)
    except ValueError as error:
        raise ModelCorrupt(f"{header.path.name}: tensors and metadata do not fit: {one_line(error)}") from error
    if ROPE_FACTORS in arrays:
        _apply_rope_factors(model, config, arrays[ROPE_FACTORS])
    model.eval()
    mx.eval(model.parameters())
    return model


def _quantized_modules(header: GGUFHeader, names: dict[str, str]) -> dict[str, int]:
    """Bits per weight by module path, for the modules whose weight is stored packed."""
    types = {parameter.removesuffix(".weight"): header.tensors[tensor].type_name for tensor, parameter in names.items()}
    return {module: QUANTIZED_BITS[kind] for module, kind in types.items() if kind in QUANTIZED_BITS}


def _parameters(
    header: GGUFHeader, config: dict[str, Any], names: dict[str, str], arrays: dict[str, mx.array], dtype: mx.Dtype
) -> Iterator[tuple[str, mx.array]]:
    """The model's parameters by path: for a packed tensor its weight, scales and biases, all in the model's row
    order.
    """
    for tensor, parameter in names.items():
        stem, _, kind = tensor.rpartition(".")
        packed = header.tensors[tensor].type_name in QUANTIZED_BITS
        order = _row_order(tensor, config)
        for part in (kind, "scales", "biases") if packed else (kind,):
            array = arrays[f"{stem}.{part}"]
            if order is not None:
                array = array[mx.array(order)]
            if mx.issubdtype(array.dtype, mx.floating):
                array = array.astype(dtype)
            yield f"{parameter.removesuffix(kind)}{part}", array


def _matrix_dtype(header: GGUFHeader) -> mx.Dtype:
    """One dtype for every floating parameter: that of the matrices, float32 where they would lose bits otherwise."""
    kinds = {info.type_name for info in header.tensors.values() if len(info.shape) == 2}
    if "F32" in kinds or ("BF16" in kinds and len(kinds) > 1):
        return mx.float32
    return mx.bfloat16 if kinds == {"BF16"} else mx.float16


def _row_order(tensor: str, config: dict[str, Any]) -> list[int] | None:
    """Which stored row belongs at each place, or None when rows are stored in order.

    Converters interleave the two halves of each head of llama's query and key projections, so that a rotation of
    neighbouring pairs does what the original rotation of halves does. The models here rotate halves.
    """
    if config["model_type"] != "llama":
        return None
    kind = tensor.split(".")[-2]
    if kind not in ("attn_q", "attn_k"):
        return None
    heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
    dim = config["head_dim"]
    return [head * dim + pair * 2 + half for head in range(heads) for half in (0, 1) for pair in range(dim // 2)]


def _apply_rope_factors(model: Any, config: dict[str, Any], factors: mx.array) -> None:
    """Give every layer the rope whose wavelengths are stretched by `factors` (how llama 3.1 scaling is stored)."""
    from mlx_lm.models.rope_utils import Llama3RoPE

    dim = config["head_dim"]
    if factors.shape != (dim // 2,):
        raise ModelCorrupt(f"the rope factors have shape {tuple(factors.shape)}, not ({dim // 2},).")
    wavelengths = config["rope_theta"] ** (mx.arange(0, dim, 2, dtype=mx.float32) / dim)
    stretched = wavelengths * factors.astype(mx.float32)
    context = config["max_position_embeddings"]
    rope = Llama3RoPE(dim, context, False, config["rope_theta"], {"factor": 1.0})
    rope._freqs = stretched
    mx.eval(stretched)
    for layer in model.layers:
        layer.self_attn.rope = rope
