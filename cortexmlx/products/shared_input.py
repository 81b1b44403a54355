"""SharedInput: several linear modules that a model calls one after the other with the same array, such as the
projections to queries, keys and values. For a lone row they are one product, launched once.

Nobody lists the modules: a lazy pass shows which get the same array. Their quantized weights are joined along the
outputs, and each module keeps a view of its part. So nothing takes more memory, and with more rows each module computes
its own product from its own weights, as before. There a part of a joint product would have to be copied.

MLX's product of a lone row computes each output by itself, in the same order. So a row's numbers have the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

import mlx.core as mx
import mlx.nn as nn

ALIGNED_OUTPUTS = 8
"""MLX's fast product for a lone row computes so many outputs together. The outputs of each module are a multiple."""


class SharedInput:
    """The joint product of quantized linear modules that are called with the same array."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Join the weights of the modules, which keep views of them. Raises what MLX raises if memory is refused."""
        names = ("weight", "scales", *(["biases"] if "biases" in modules[0] else []))
        joined = {name: mx.concatenate([module[name] for module in modules]) for name in names}
        mx.eval(joined)
        self._joined = joined
        self._ends: dict[int, tuple[int, int]] = {}
        begin = 0
        for module in modules:
            end = begin + module["weight"].shape[0]
            for name in names:
                module[name] = joined[name][begin:end]
            mx.eval([module[name] for name in names])
            self._ends[id(module)] = begin, end
            begin = end
        self._form = {"group_size": modules[0].group_size, "bits": modules[0].bits, "mode": modules[0].mode}
        self._input: mx.array | None = None
        self._product: mx.array | None = None
        self._waiting: set[int] = set()

    def forget(self) -> None:
        """Forget the array and the product of a step that failed."""
        self._input = self._product = None

    def part(self, module: nn.Module, x: mx.array) -> mx.array:
        """Return a module's product with a lone row `x`, without its bias. The first module computes it for all."""
        if self._input is not x or id(module) not in self._waiting:
            self._input, self._waiting = x, set(self._ends)
            weights, scales, biases = self._joined["weight"], self._joined["scales"], self._joined.get("biases")
            self._product = mx.quantized_matmul(x, weights, scales, biases, **self._form)
        assert self._product is not None
        begin, end = self._ends[id(module)]
        part = self._product[..., begin:end]
        self._waiting.discard(id(module))
        if not self._waiting:
            self.forget()
        return part


def find_shared_inputs(calls: Sequence[tuple[nn.Module, mx.array]]) -> Iterator[list[nn.Module]]:
    """Yield the modules of each array that several modules in a row got, if their weights can be joined. `calls` are
    those of a pass, in order, with their arrays.
    """
    counts = Counter(id(module) for module, _ in calls)
    for _, same in groupby(calls, key=lambda call: (id(call[1]), _form(call[0]))):
        modules = [
            module for module, _ in same if counts[id(module)] == 1 and module["weight"].shape[0] % ALIGNED_OUTPUTS == 0
        ]
        if len(modules) > 1:
            yield modules


def _form(module: nn.Module) -> tuple[object, ...]:
    """Return what modules must have in common for their weights to be joined."""
    scales = module["scales"]
    return module.mode, module.bits, module.group_size, module["weight"].shape[1:], scales.dtype, "biases" in module
