"""What the operations of a decode step bind: the weights of a model, and the slabs of its arena."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.nn as nn
from mlx.utils import tree_flatten

OTHERS = 11
"""Kernels of a layer beside one for each of its modules with weights: two rotations, two for attention, a copy and an
update of the tail for keys and for values, two sums, and one of the MLP. It is a llama's number; other layers have more
or fewer.
"""


def bound_elements(model: nn.Module, slabs: Mapping[int, int]) -> list[int]:
    """Return for each operation of a decode step, in order, how many elements it binds. `slabs` has the elements of a
    layer's slab, by the layer's index.
    """
    modules: dict[str, int] = {}
    for name, array in tree_flatten(model.parameters()):
        module = name.rpartition(".")[0]
        modules[module] = modules.get(module, 0) + array.size
    layers: dict[int, list[int]] = {}
    around: list[int] = []  # the embedding, the last norm, the projection to the vocabulary
    for module, elements in modules.items():
        layer = _layer(module)
        (around if layer is None else layers.setdefault(layer, [])).append(elements)
    bound = around[:1]
    for layer in sorted({*layers, *slabs}):
        attention = [slabs[layer]] if layer in slabs else []
        bound += layers.get(layer, []) + attention + [0] * (OTHERS - len(attention))
    return bound + (around[1:] if len(around) > 2 else around[1:] + around[:1])  # a tied projection is the embedding


def _layer(module: str) -> int | None:
    """Return the index of the layer that a module belongs to: the first number of its name."""
    return next((int(part) for part in module.split(".") if part.isdigit()), None)
