"""A loaded model's weights: their size, and their conversion to float32 for MLX's CPU build.

That build computes matrix products fast in float32, through BLAS, and slowly in every other type.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.bitlinear_layers import BitLinear
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear


def is_quantized(model: Any) -> bool:
    """Return whether any layer of the model holds packed weights."""
    return any("scales" in layer or isinstance(layer, BitLinear) for _, layer in model.named_modules())


def convert_to_float32(model: Any) -> None:
    """Replace the model's quantized layers by plain ones and make every floating parameter float32, in place. Nothing
    is computed yet.

    Scales are widened before the weights are expanded, so no bit is lost. Layers of a kind that has no plain twin here
    stay packed, and compute the same.
    """
    model.set_dtype(mx.float32)
    dequantize_layers(model)
    convert_activations_to_float32(model)


def dequantize_layers(model: Any) -> None:
    """Replace the model's quantized layers by plain ones, in place. Nothing is computed yet."""
    plain_layers = [
        (path, plain_layer)
        for path, layer in model.named_modules()
        if (plain_layer := _make_plain_layer(layer)) is not None
    ]
    model.update_modules(tree_unflatten(plain_layers))


def convert_activations_to_float32(model: Any) -> None:
    """Make all floating parameters, and so the activations, float32: in place, lazily. Packed weights stay packed."""
    model.set_dtype(mx.float32)


def _make_plain_layer(layer: Any) -> Any:
    """Return a plain layer with the values of a packed layer; None for a layer that is not packed."""
    plain_layer: Any
    if isinstance(layer, BitLinear):
        return _dequantize_bitlinear(layer)
    if isinstance(layer, nn.QuantizedLinear):
        plain_layer = nn.Linear(1, 1, bias="bias" in layer)
    elif isinstance(layer, nn.QuantizedEmbedding):
        plain_layer = nn.Embedding(1, 1)
    elif isinstance(layer, QuantizedSwitchLinear):
        plain_layer = SwitchLinear(1, 1, 1, bias="bias" in layer)
    elif isinstance(layer, QuantizedMultiLinear):
        plain_layer = MultiLinear(1, 1, 1)
    else:
        return None
    if "global_scale" in layer:
        parts = zip(layer.weight, layer.scales, layer.global_scale, strict=True)
        plain_layer.weight = mx.stack([_dequantize_codes(layer, *part) for part in parts])
    else:
        plain_layer.weight = _dequantize_codes(layer, layer.weight, layer.scales)
    if "bias" in layer:
        plain_layer.bias = layer.bias
    return plain_layer


def _dequantize_codes(layer: Any, codes: mx.array, scales: mx.array, global_scale: mx.array | None = None) -> mx.array:
    """Return the float32 numbers that the codes of a packed layer stand for. `global_scale` scales all of them."""
    return mx.dequantize(
        codes,
        scales,
        layer.get("biases"),
        layer.group_size,
        layer.bits,
        layer.mode,
        global_scale=global_scale,
        dtype=None if layer.mode == "affine" else mx.float32,
    )


def _dequantize_bitlinear(layer: Any) -> Any:
    """Return a plain layer with the values of BitNet's ternary layer.

    A byte has four codes of two bits, for four rows that are a quarter of all rows apart. A code minus one is -1, 0 or
    1.
    """
    rows = layer.out_features
    codes = mx.concatenate([(layer.weight >> shift) & 3 for shift in (0, 2, 4, 6)])[:rows]
    scale = layer.weight_scale.astype(mx.float32)
    plain_layer = nn.Linear(1, 1, bias="bias" in layer)
    plain_layer.weight = (codes.astype(mx.float32) - 1) * (1 / scale if layer.invert_weight_scales else scale)
    if "bias" in layer:
        plain_layer.bias = layer.bias
    return plain_layer


def find_unsupported_on_cpu(model: Any) -> str | None:
    """Return the name of the packed layers that MLX's CPU build cannot compute; None if it can compute all."""
    for _, layer in model.named_modules():
        if isinstance(layer, BitLinear):
            return "BitNet's ternary layers"
        if isinstance(layer, QuantizedSwitchLinear) and "global_scale" in layer:
            return "nvfp4 experts with a scale for each of them"
    return None


def quantizes_activations(model: Any) -> bool:
    """Return whether any layer quantizes its activations, too, to multiply them by packed weights."""
    return any(isinstance(layer, nn.QQLinear) for _, layer in model.named_modules())


def release_arrays(model: Any) -> None:
    """Remove all arrays from the model, in place. The model cannot be used afterwards.

    So whoever still refers to one of its layers keeps no weights: for example the traceback of an error that an app
    keeps.

    Modules that hold nothing are left alone. mlx-lm makes some only once for all models: the activation of experts is
    the default of an argument.
    """
    for _, layer in model.named_modules():
        if layer:
            layer.clear()
            vars(layer).clear()


def parameter_count(model: Any) -> int:
    """Return the model's number of parameters. Packed weights count as what they expand to."""
    layers = tree_flatten(model.leaf_modules(), is_leaf=lambda layer: hasattr(layer, "leaf_modules"))
    count = 0
    for _, layer in layers:
        arrays = dict(tree_flatten(layer.parameters()))
        if "scales" in arrays and hasattr(layer, "bits"):
            count += arrays["weight"].size * 32 // layer.bits + (arrays["bias"].size if "bias" in arrays else 0)
        elif isinstance(layer, BitLinear):
            count += layer.in_features * layer.out_features + (arrays["bias"].size if "bias" in arrays else 0)
        else:
            count += sum(array.size for array in arrays.values() if isinstance(array, mx.array))
    return count


def weight_bytes(model: Any, *, as_float32: bool = False) -> int:
    """Return the bytes of the model's weights in memory. With `as_float32`, count every floating number as float32."""
    arrays = [array for _, array in tree_flatten(model.parameters())]
    return sum(4 * a.size if as_float32 and mx.issubdtype(a.dtype, mx.floating) else a.nbytes for a in arrays)
