"""Tracks which module of a model is running, so that a probe sees which one touches a cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn

_one_at_a_time = threading.Lock()
"""Two that watch models of the same classes at once would restore each other's methods."""


@contextmanager
def running_modules(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield a list that has the model's modules whose `__call__` is running on this thread, the innermost last.
    Afterwards their classes are unchanged.
    """
    with _one_at_a_time:
        yield from _watch(model)


def _watch(model: nn.Module) -> Iterator[list[nn.Module]]:
    running: list[nn.Module] = []
    own = {owner: owner.__dict__.get("__call__") for owner in {type(module) for module in model.modules()}}
    try:
        for owner in own:
            if any("__call__" in base.__dict__ for base in owner.__mro__):
                _wrap(owner, running)
        yield running
    finally:
        for owner, method in own.items():
            if method is not None:
                owner.__call__ = method
            elif "__call__" in owner.__dict__:
                del owner.__call__


def _wrap(owner: Any, running: list[nn.Module]) -> None:
    original: Callable[..., Any] = owner.__call__
    here = threading.get_ident()

    def call(module: nn.Module, *inputs: Any, **others: Any) -> Any:
        if threading.get_ident() != here:  # another engine runs a model of the same class
            return original(module, *inputs, **others)
        running.append(module)
        try:
            return original(module, *inputs, **others)
        finally:
            running.pop()

    owner.__call__ = call
