"""Where an adapter can be added to a model's modules, found by a pass that is never evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from cortexmlx.execution.logit_rows import own_modules

_ALL, _PICKED = 3, (0, 2)
"""Tokens of that pass, and those that get logits."""


@cache
def adapted(kind: type[Any]) -> type[Any]:
    """Return a class of modules like `kind` whose output goes through the module's own `add_adapter`."""
    own = kind.__call__

    def call(module: Any, x: mx.array) -> Any:
        return module.add_adapter(x, own(module, x))

    return type(f"Adapted{kind.__name__}", (kind,), {"__call__": call, "unadapted": kind})


def restore(modules: Iterable[nn.Module]) -> None:
    """Undo what an exception that was thrown into `in_place` left in place."""
    for module in modules:
        if (kind := getattr(type(module), "unadapted", None)) is not None:
            object.__setattr__(module, "__class__", kind)


@contextmanager
def in_place(modules: Iterable[nn.Module], made: Callable[[Any], type[Any]] = adapted) -> Iterator[None]:
    """Make each module an instance of `made(its class)` in this context."""
    kinds: list[tuple[nn.Module, Any]] = [(module, type(module)) for module in modules]
    become = object.__setattr__  # nn.Module's own takes ten times as long, and this happens in each step
    try:
        for module, kind in kinds:
            become(module, "__class__", made(kind))
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
    return {name: module for name, module in own_modules(model) if linear_size(module) is not None}


def refusals(
    modules: Mapping[str, nn.Module], lazy_pass: Callable[[mx.array, Sequence[int]], object]
) -> dict[str, str]:
    """Return why an adapter cannot be added to some of the `modules`, by name. `lazy_pass(tokens, rows)` builds a pass
    over flat tokens `[T, 1]` of which `rows` get logits. Nothing is evaluated.

    A layer that the pass does not use at all may have one: it has no effect there, as with mlx-lm.
    """
    seen = {id(module): _Seen() for module in modules.values()}
    with in_place({id(module): module for module in modules.values()}.values(), partial(_noted, seen)):
        lazy_pass(mx.zeros((_ALL, 1), mx.int32), _PICKED)
    found = {}
    for name, module in modules.items():
        if seen[id(module)].read:
            found[name] = "the model's code reads its weights, and does not only call it"
        elif any(count != _ALL for count in seen[id(module)].tokens):
            found[name] = "it does not get all tokens of a step, as the layer that gives the logits, or an expert"
    return found


@dataclass
class _Seen:
    """What a pass did with a module."""

    tokens: list[int] = field(default_factory=list)
    """How many tokens each call had."""
    read: bool = False
    """Whether its arrays were read outside of its calls."""
    calling: bool = False


def _noted(seen: Mapping[int, _Seen], kind: type[Any]) -> type[Any]:
    """Return a class of modules like `kind` that note what happens to them in `seen`, by their ids."""

    def call(module: Any, x: mx.array) -> Any:
        mine = seen[id(module)]
        mine.tokens.append(x.size // x.shape[-1])
        mine.calling = True
        try:
            return kind.__call__(module, x)
        finally:
            mine.calling = False

    def read(module: Any, name: str) -> Any:
        value = kind.__getattr__(module, name)
        if isinstance(value, mx.array) and not seen[id(module)].calling:
            seen[id(module)].read = True
        return value

    def item(module: Any, name: str) -> Any:
        value = kind.__getitem__(module, name)
        if isinstance(value, mx.array) and not seen[id(module)].calling:
            seen[id(module)].read = True
        return value

    return type(f"Noted{kind.__name__}", (kind,), {"__call__": call, "__getattr__": read, "__getitem__": item})
