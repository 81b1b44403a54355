"""Where an adapter can be added to a model's modules, found by a pass that is never evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Add = Callable[[mx.array, mx.array], mx.array]
"""`add(x, out)` returns a layer's output with what an adapter adds."""

_ALL, _PICKED = 3, (0, 2)
"""Tokens of that pass, and those that get logits."""


@cache
def adapted(kind: type[Any]) -> type[Any]:
    """Return a class of modules like `kind` whose output goes through the module's own `add_adapter`."""
    own = kind.__call__

    def call(module: Any, x: mx.array) -> Any:
        return module.add_adapter(x, own(module, x))

    return type(f"Adapted{kind.__name__}", (kind,), {"__call__": call})


@contextmanager
def in_place(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules that have an `add_adapter` ask it, in this context."""
    kinds: list[tuple[nn.Module, Any]] = [(module, type(module)) for module in modules]
    become = object.__setattr__  # nn.Module's own takes ten times as long, and this happens in each step
    try:
        for module, kind in kinds:
            become(module, "__class__", adapted(kind))
        yield
    finally:
        for module, kind in kinds:
            become(module, "__class__", kind)


def linear_size(module: nn.Module) -> tuple[int, int] | None:
    """Return the inputs and outputs of a linear layer, quantized or not; None for any other module."""
    if isinstance(module, nn.QuantizedLinear):
        outs, words = module.weight.shape
        return words * 32 // module.bits, outs
    if isinstance(module, nn.Linear):
        outs, ins = module.weight.shape
        return ins, outs
    return None


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of a model by name. A module that has two names is under both."""
    return {name: module for name, module in model.named_modules() if linear_size(module) is not None}


def refusals(
    modules: Mapping[str, nn.Module], lazy_pass: Callable[[mx.array, Sequence[int]], object]
) -> dict[str, str]:
    """Return why an adapter cannot be added to some of the `modules`, by name. `lazy_pass(tokens, rows)` builds a pass
    over flat tokens `[T, 1]` of which `rows` get logits. Nothing is evaluated.
    """
    calls: dict[int, list[int]] = {id(module): [] for module in modules.values()}
    every = {id(module): module for module in modules.values()}
    for module in every.values():
        module.add_adapter = _noting(calls[id(module)])
    try:
        with in_place(every.values()):
            lazy_pass(mx.zeros((_ALL, 1), mx.int32), _PICKED)
    finally:
        for module in every.values():
            del module.add_adapter
    found = {}
    for name, module in modules.items():
        counts = calls[id(module)]
        if not counts:
            found[name] = "the model's code does not call it, but reads its weights"
        elif any(count != _ALL for count in counts):
            found[name] = "it does not get all tokens of a step, as the layer that gives the logits, or an expert"
    return found


def _noting(counts: list[int]) -> Add:
    """Return what notes how many tokens a module gets, and adds nothing."""

    def add(x: mx.array, out: mx.array) -> mx.array:
        counts.append(x.size // x.shape[-1])
        return out

    return add
