"""Estimates how many command buffers a decode step takes on a Mac's GPU, and how far that limits the run-ahead.

Read in MLX's source (0.32: `backend/metal/device.cpp`, `backend/metal/eval.cpp`, `transforms.cpp`, `utils.h`):

- After each operation of the graph, MLX commits the command buffer if more than `operations` kernels are in it, or if
  the arrays that are bound to it have more than `elements` Mi elements, rounded down. The limits are the chip's, or
  those of `MLX_MAX_OPS_PER_BUFFER` and `MLX_MAX_MB_PER_BUFFER`, read once, when the GPU is first used. There is no
  other way to set them. (In spite of its name, the second one counts elements, not bytes.)
- A buffer counts once in each command buffer, with the elements of the first array that is bound to it. So an arena
  that is split into more arrays counts as much as before, since a layer binds all of its part. A view counts with its
  own elements, but not where the whole slab is bound before it.
- A commit for one of these reasons is a task. While more than ten tasks are in flight, the thread that hands over the
  graph waits. What `async_eval` commits at its end is no task.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import mlx.nn as nn
from mlx.utils import tree_flatten

from cortexmlx.stats import CommandBuffers

MAX_TASKS_IN_FLIGHT = 10
"""Tasks in flight (`MAX_ACTIVE_TASKS`)."""

_LIMITS_BY_CHIP = {"p": (20, 40), "g": (40, 40), "s": (50, 50), "d": (50, 50)}
"""By the last letter of a GPU's architecture (phone; base and Pro; Max; Ultra): the operations, and the Mi elements."""

_OPERATIONS, _ELEMENTS = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"


@dataclass(frozen=True)
class CommandBufferLimits:
    """How many operations and elements a command buffer may have before MLX commits it."""

    operations: int
    elements: int
    """In Mi."""


def command_buffer_limits(architecture: str, environment: Mapping[str, str]) -> CommandBufferLimits:
    """Return the limits of a GPU, such as "applegpu_g16s", unless the `environment` sets others."""
    operations, elements = _LIMITS_BY_CHIP.get(architecture[-1:], _LIMITS_BY_CHIP["g"])
    return CommandBufferLimits(
        _read_number(environment, _OPERATIONS, operations), _read_number(environment, _ELEMENTS, elements)
    )


def _read_number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return an environment variable as C's `atoi` reads it: 0 if it is no number."""
    if name not in environment:
        return default
    match = re.match(r"\s*([+-]?\d+)", environment[name], re.ASCII)
    return int(match[1]) if match else 0


def count_command_buffers(element_counts: Iterable[int], limits: CommandBufferLimits) -> CommandBuffers:
    """Return how many command buffers a decode step takes. `element_counts` has for each of its operations, in order,
    the elements of the weights and slabs that it binds. Activations are left out: they are small in a decode step.
    """
    tasks = operations = elements = 0
    for count in element_counts:
        operations, elements = operations + 1, elements + count
        if operations > limits.operations or elements >> 20 > limits.elements:
            tasks += 1
            operations = elements = 0
    return CommandBuffers(
        per_step=tasks + (operations > 0),
        max_operations=limits.operations,
        max_elements=limits.elements,
        run_ahead=min(1.0, MAX_TASKS_IN_FLIGHT / tasks) if tasks else 1.0,
    )


# What the operations of a decode step bind: the weights of a model, and the slabs of its arena.


OTHER_KERNELS = 11
"""Kernels of a layer beside one for each of its modules with weights: two rotations, two for attention, a copy and an
update of the tail for keys and for values, two sums, and one of the MLP. It is a llama's number; other layers have more
or fewer.
"""


def count_bound_elements(model: nn.Module, slabs: Mapping[int, int]) -> list[int]:
    """Return how many elements each operation of a decode step binds, in order. `slabs` counts slabs', by layer."""
    modules: dict[str, int] = {}
    for name, array in tree_flatten(model.parameters()):
        module = name.rpartition(".")[0]
        modules[module] = modules.get(module, 0) + array.size
    layers: dict[int, list[int]] = {}
    outer_counts: list[int] = []  # the embedding, the last norm, the projection to the vocabulary
    for module, elements in modules.items():
        layer = next((int(part) for part in module.split(".") if part.isdigit()), None)  # the first number of its name
        (outer_counts if layer is None else layers.setdefault(layer, [])).append(elements)
    element_counts = outer_counts[:1]
    for layer in sorted({*layers, *slabs}):
        attention = [slabs[layer]] if layer in slabs else []
        element_counts += layers.get(layer, []) + attention + [0] * (OTHER_KERNELS - len(attention))
    return element_counts + (
        outer_counts[1:] if len(outer_counts) > 2 else outer_counts[1:] + outer_counts[:1]
    )  # a tied projection is the embedding
