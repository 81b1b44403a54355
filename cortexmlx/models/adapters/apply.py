"""The adapter of a whole engine (`Engine(adapter=...)`): its numbers become a part of the loaded model, through
mlx-lm's own layers. Adapters of single requests are read by `low_rank.py`.

mlx-lm refuses numbers that have no place in the model, but accepts places without numbers: a layer whose `lora_a` is
missing computes with random ones. Here names must match in both directions, and nothing is computed before that is
checked.
"""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.mlx_lm.package import import_mlx_lm_utils, without_side_effects
from cortexmlx.models.adapters.files import Adapter, AdapterKind
from cortexmlx.models.messages import one_line

_LORA_PARAMETERS = {"lora_a", "lora_b", "m"}
_MAX_QUOTED = 3
"""How many of the names that do not fit an error quotes."""


def apply_adapter(model: Any, adapter: Adapter) -> str:
    """Apply an adapter to a loaded model, in place: wrap its layers, and load the adapter's weights. Return a note for
    the user.

    Raises ModelUnsupported if the adapter was made for another model, with what does not fit. Raises ModelCorrupt if
    its numbers are NaN or infinite, or if its files have changed since they were first read.
    """
    parameters = dict(tree_flatten(model.parameters()))
    if adapter.kind is not AdapterKind.FULL:
        parameters = _add_lora_layers(model, adapter, set(parameters))
    _check_tensors_fit(adapter, parameters)
    weights = _load_arrays(adapter)
    mistyped_names = [name for name, array in weights.items() if _is_float(array) != _is_float(parameters[name])]
    if mistyped_names:
        types = f"{weights[mistyped_names[0]].dtype}, the model's {parameters[mistyped_names[0]].dtype}"
        raise ModelUnsupported(f"the adapter {adapter.path} does not fit: its {mistyped_names[0]} is {types}.")
    if non_finite_names := [name for name, array in weights.items() if not mx.all(mx.isfinite(array)).item()]:
        raise ModelCorrupt(
            f"{adapter.weights} is damaged: {len(non_finite_names)} of its {len(weights)} tensors hold what is no "
            f"number (NaN or infinite): {_quote_names(non_finite_names)}. Copy it again, or train it anew."
        )
    adapter.check_unchanged()
    model.load_weights(list(weights.items()), strict=False)
    mx.eval(model.parameters())
    return _describe_adapter(adapter)


def _add_lora_layers(model: Any, adapter: Adapter, existing_names: set[str]) -> dict[str, mx.array]:
    """Wrap the model's layers in mlx-lm's LoRA layers. Return by name the new parameters that the adapter must fill."""
    import_mlx_lm_utils()
    with without_side_effects():
        tuner = importlib.import_module("mlx_lm.tuner.utils")
    dora = adapter.kind is AdapterKind.DORA
    try:
        tuner.linear_to_lora_layers(model, adapter.num_layers, dict(adapter.settings), use_dora=dora)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnsupported(f"the adapter {adapter.path} cannot be applied here: {one_line(error)}") from error
    parameters = tree_flatten(model.parameters())
    return {
        name: array
        for name, array in parameters
        if name not in existing_names and name.rpartition(".")[2] in _LORA_PARAMETERS
    }


def _check_tensors_fit(adapter: Adapter, parameters: dict[str, mx.array]) -> None:
    """Raise ModelUnsupported if the names or shapes of the adapter's tensors differ from the model's parameters."""
    shapes = adapter.shapes
    unknown_names = [name for name in shapes if name not in parameters]
    missing_names = [] if adapter.kind is AdapterKind.FULL else [name for name in parameters if name not in shapes]
    misfits = [name for name in shapes if name in parameters and shapes[name] != parameters[name].shape]
    faults = []
    if unknown_names:
        faults.append(
            f"{len(unknown_names)} of its {len(shapes)} tensors have no place in the model "
            f"({_quote_names(unknown_names)})"
        )
    if missing_names:
        faults.append(f"{len(missing_names)} places get no tensor ({_quote_names(missing_names)})")
    if misfits:
        first = misfits[0]
        faults.append(
            f"{len(misfits)} have another shape ({first} is {shapes[first]}, the model's {parameters[first].shape})"
        )
    if faults:
        made_for = f" It was made for {adapter.base}." if adapter.base else ""
        raise ModelUnsupported(f"the adapter {adapter.path} does not fit this model: {'; '.join(faults)}.{made_for}")


def _quote_names(names: list[str]) -> str:
    """Return the first few of the names as a text, for an error message."""
    return ", ".join(sorted(names)[:_MAX_QUOTED]) + (", ..." if len(names) > _MAX_QUOTED else "")


def _load_arrays(adapter: Adapter) -> dict[str, mx.array]:
    """Load the adapter's arrays from its file, with mlx-lm's names and layout."""
    try:
        file_arrays: Any = mx.load(str(adapter.weights))
    except (RuntimeError, OSError, ValueError) as error:
        raise ModelCorrupt(f"{adapter.weights} cannot be read: {one_line(error)}") from error
    arrays = {name: file_arrays[adapter.names.get(name, name)] for name in adapter.shapes}
    if adapter.is_transposed:
        arrays = {name: mx.contiguous(array.T) for name, array in arrays.items()}
    return arrays


def _is_float(array: mx.array) -> bool:
    return bool(mx.issubdtype(array.dtype, mx.floating))


def _describe_adapter(adapter: Adapter) -> str:
    """Return the note for the user: the adapter's kind, rank and scale, and how much of the model it changes."""
    made_for = f", made for {adapter.base}" if adapter.base else ""
    if adapter.kind is AdapterKind.FULL:
        return f"adapter {adapter.path}: {len(adapter.shapes)} tensors take the place of the model's{made_for}"
    modules = len({name.rpartition(".")[0] for name in adapter.shapes})
    rank, scale = adapter.settings["rank"], adapter.settings["scale"]
    kind = f"{adapter.kind.value} of rank {rank}, scale {scale:g}, on {modules} layers"
    return f"adapter {adapter.path}: {kind}{made_for}"
