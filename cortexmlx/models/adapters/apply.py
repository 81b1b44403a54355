"""Put an adapter's numbers into a loaded model, through mlx-lm's own layers.

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
from cortexmlx.mlx_lm.package import mlx_lm_utils, without_side_effects
from cortexmlx.models.adapters.files import Adapter, AdapterKind
from cortexmlx.models.messages import one_line

_LEAVES = {"lora_a", "lora_b", "m"}
_NAMED = 3
"""How many of the names that do not fit an error quotes."""


def apply_adapter(model: Any, adapter: Adapter) -> str:
    """Wrap `model`'s layers in place and load the adapter's numbers into them. Return a note on what was done.

    Raises ModelUnsupported if the adapter was made for another model, with what does not fit. Raises ModelCorrupt if
    its numbers are NaN or infinite, or if its files have changed since they were first read.
    """
    places = dict(tree_flatten(model.parameters()))
    if adapter.kind is not AdapterKind.FULL:
        places = _wrapped(model, adapter, set(places))
    _check_names(adapter, places)
    weights = _read(adapter)
    wrong = [name for name, array in weights.items() if _is_float(array) != _is_float(places[name])]
    if wrong:
        types = f"{weights[wrong[0]].dtype}, the model's {places[wrong[0]].dtype}"
        raise ModelUnsupported(f"the adapter {adapter.path} does not fit: its {wrong[0]} is {types}.")
    if broken := [name for name, array in weights.items() if not mx.all(mx.isfinite(array)).item()]:
        raise ModelCorrupt(
            f"{adapter.weights} is damaged: {len(broken)} of its {len(weights)} tensors hold what is no number (NaN or "
            f"infinite): {_some(broken)}. Copy it again, or train it anew."
        )
    adapter.check_unchanged()
    model.load_weights(list(weights.items()), strict=False)
    mx.eval(model.parameters())
    return _note(adapter)


def _wrapped(model: Any, adapter: Adapter, before: set[str]) -> dict[str, mx.array]:
    """Give the layers of `model` places for an adapter's numbers. Return these places by name."""
    mlx_lm_utils()
    with without_side_effects():
        tuner = importlib.import_module("mlx_lm.tuner.utils")
    dora = adapter.kind is AdapterKind.DORA
    try:
        tuner.linear_to_lora_layers(model, adapter.num_layers, dict(adapter.settings), use_dora=dora)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnsupported(f"the adapter {adapter.path} cannot be applied here: {one_line(error)}") from error
    after = tree_flatten(model.parameters())
    return {name: array for name, array in after if name not in before and name.rpartition(".")[2] in _LEAVES}


def _check_names(adapter: Adapter, places: dict[str, mx.array]) -> None:
    shapes = adapter.shapes
    unknown = [name for name in shapes if name not in places]
    missing = [] if adapter.kind is AdapterKind.FULL else [name for name in places if name not in shapes]
    misfits = [name for name in shapes if name in places and shapes[name] != places[name].shape]
    faults = []
    if unknown:
        faults.append(f"{len(unknown)} of its {len(shapes)} tensors have no place in the model ({_some(unknown)})")
    if missing:
        faults.append(f"{len(missing)} places get no tensor ({_some(missing)})")
    if misfits:
        first = misfits[0]
        faults.append(
            f"{len(misfits)} have another shape ({first} is {shapes[first]}, the model's {places[first].shape})"
        )
    if faults:
        made_for = f" It was made for {adapter.base}." if adapter.base else ""
        raise ModelUnsupported(f"the adapter {adapter.path} does not fit this model: {'; '.join(faults)}.{made_for}")


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _read(adapter: Adapter) -> dict[str, mx.array]:
    try:
        stored: Any = mx.load(str(adapter.weights))
    except (RuntimeError, OSError, ValueError) as error:
        raise ModelCorrupt(f"{adapter.weights} cannot be read: {one_line(error)}") from error
    arrays = {name: stored[adapter.names.get(name, name)] for name in adapter.shapes}
    if adapter.transposed:
        arrays = {name: mx.contiguous(array.T) for name, array in arrays.items()}
    return arrays


def _is_float(array: mx.array) -> bool:
    return bool(mx.issubdtype(array.dtype, mx.floating))


def _note(adapter: Adapter) -> str:
    made_for = f", made for {adapter.base}" if adapter.base else ""
    if adapter.kind is AdapterKind.FULL:
        return f"adapter {adapter.path}: {len(adapter.shapes)} tensors take the place of the model's{made_for}"
    modules = len({name.rpartition(".")[0] for name in adapter.shapes})
    rank, scale = adapter.settings["rank"], adapter.settings["scale"]
    kind = f"{adapter.kind.value} of rank {rank}, scale {scale:g}, on {modules} layers"
    return f"adapter {adapter.path}: {kind}{made_for}"
