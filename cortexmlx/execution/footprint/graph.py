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
    """A call of one of MLX's primitives."""

    kind: str
    """The primitive's name, such as "Transpose"."""

    takes: tuple[str, ...]
    """Names of its inputs."""

    makes: tuple[Array, ...]
    """Its outputs."""

    settings: Sequence[Any] = ()
    """Its other arguments, such as the order of a transpose's axes."""


@dataclass
class Graph:
    """The computation graph of a traced function."""

    operations: list[Operation] = field(default_factory=list)
    """All operations; each one comes after those that make its inputs."""

    given: list[Array] = field(default_factory=list)
    """The function's arguments."""

    constants: list[Array] = field(default_factory=list)
    """Arrays that the function uses and did not make."""

    results: list[str] = field(default_factory=list)
    """Names of the arrays that the function returns."""

    first: list[tuple[str, ...]] = field(default_factory=list)
    """Names of arrays that are computed before the others, tuple by tuple."""


def trace(
    function: Callable[..., Sequence[mx.array]], *given: mx.array, first: list[tuple[mx.array, ...]] | None = None
) -> Graph:
    """Return the graph of `function(*given)`. Nothing is computed, not even the arguments. The function may append to
    `first` the arrays that are computed before the rest. Raises ValueError for what MLX cannot export.
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
