"""A computation graph as data: operations with the shapes of their inputs and outputs. Nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class Array:
    """One array of a graph. `name` is the trace's."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        size = self.itemsize
        for count in self.shape:
            size *= count
        return size


@dataclass(frozen=True)
class Operation:
    """One of MLX's primitives, what it `takes` and `makes`. `settings` are its own: the order of a transpose, ..."""

    kind: str
    takes: tuple[str, ...]
    makes: tuple[Array, ...]
    settings: Sequence[Any] = ()


@dataclass
class Graph:
    """All operations, in an order in which they could be computed; `given` are the arguments of the traced function,
    `results` what it returns, `constants` the arrays that it brought along. `first` are arrays that are computed before
    the others, one tuple after the other.
    """

    operations: list[Operation] = field(default_factory=list)
    given: list[Array] = field(default_factory=list)
    constants: list[Array] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    first: list[tuple[str, ...]] = field(default_factory=list)


def trace(
    function: Callable[..., Sequence[mx.array]], *given: mx.array, first: list[tuple[mx.array, ...]] | None = None
) -> Graph:
    """The graph of `function(*given)`. Neither the arguments nor anything else is computed. While it runs, the function
    may append to `first` what is to be computed before the rest. Raises ValueError for what MLX cannot export.
    """
    graph = Graph()
    sooner: list[tuple[mx.array, ...]] = [] if first is None else first

    def all_of_it(*arguments: mx.array) -> list[mx.array]:
        results = list(function(*arguments))
        return [*(array for arrays in sooner for array in arrays), *results]

    def note(part: dict[str, Any]) -> None:
        kind = part["type"]
        if kind == "primitive":
            takes = tuple(entry[0] for entry in part["inputs"])
            makes = tuple(_array(*entry) for entry in part["outputs"])
            graph.operations.append(Operation(part["name"], takes, makes, part.get("arguments", ())))
        elif kind == "inputs":
            graph.given = [_array(*entry) for entry in part["inputs"]]
        elif kind == "outputs":
            graph.results = [entry[0] for entry in part["outputs"]]
        elif kind == "constants":
            graph.constants = [_array(name, array.shape, array.dtype) for name, array in part["constants"]]

    contiguous = mx.contiguous
    mx.contiguous = _contiguous
    try:
        mx.export_function(note, all_of_it, *given)
    finally:
        mx.contiguous = contiguous
    for arrays in sooner:
        graph.first.append(tuple(graph.results[: len(arrays)]))
        del graph.results[: len(arrays)]
    sooner.clear()
    return graph


def _contiguous(array: mx.array, *_: Any, **__: Any) -> mx.array:
    """`mx.contiguous`, which MLX does not export, by two operations that copy what it copies and nothing else."""
    return array.reshape(-1).reshape(array.shape)


def _array(name: str, shape: Sequence[int], dtype: mx.Dtype) -> Array:
    return Array(name, tuple(shape), dtype.size)
