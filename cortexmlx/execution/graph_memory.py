"""Predicts the memory that MLX takes to evaluate a computation graph, from the graph alone: nothing is computed.

Read in MLX's source (`transforms.cpp`, `backend/cpu/eval.cpp` and `encoder.h`, 0.32): the graph becomes a tape in
breadth-first order of at most `MAX_TAPE_WIDTH` arrays, which is computed from its end; of a graph that is handed over
in parts, each part becomes one. The thread that walks the tape allocates the results; another one computes them, at
most ten tasks of ten calls later, and only then what they were made of is given back. An array that nobody else holds
becomes the result of an elementwise operation on it.

No formula takes its place. What is alive between two operations is 0.22 to 1.4 times the peak of this replay, and with
all results of the last 50 operations 0.5 to 2.7 times, for the models and steps of `bench/studies/plan_accuracy.py`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

# The graph of a function, as data.


@dataclass(frozen=True)
class GraphArray:
    """An array of a traced graph. `name` is the one that the trace gives it."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array's elements."""
        size = self.itemsize
        for count in self.shape:
            size *= count
        return size


@dataclass(frozen=True)
class Operation:
    """A call of an MLX primitive in a graph."""

    kind: str
    """The primitive's name, such as "Transpose"."""

    inputs: tuple[str, ...]
    """Names of its inputs."""

    outputs: tuple[GraphArray, ...]
    """Its outputs."""

    arguments: Sequence[Any] = ()
    """Its other arguments, such as the order of a transpose's axes."""


@dataclass
class Graph:
    """The computation graph of a traced function."""

    operations: list[Operation] = field(default_factory=list)
    """All operations; each one comes after those that make its inputs."""

    arguments: list[GraphArray] = field(default_factory=list)
    """The function's arguments."""

    constants: list[GraphArray] = field(default_factory=list)
    """Arrays that the function uses and did not make."""

    results: list[str] = field(default_factory=list)
    """Names of the arrays that the function returns."""

    computed_first: list[tuple[str, ...]] = field(default_factory=list)
    """Names of arrays that are computed before the others, tuple by tuple."""


def trace_graph(
    function: Callable[..., Sequence[mx.array]], *given: mx.array, first: list[tuple[mx.array, ...]] | None = None
) -> Graph:
    """Return the computation graph of `function(*given)`. Nothing is computed, not even the arguments. The function
    may append to `first` the arrays that are computed before the rest. Raises ValueError for what MLX cannot
    export.
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
            makes = tuple(_make_array(*entry) for entry in part["outputs"])
            graph.operations.append(Operation(part["name"], takes, makes, part.get("arguments", ())))
        elif kind == "inputs":
            graph.arguments = [_make_array(*entry) for entry in part["inputs"]]
        elif kind == "outputs":
            graph.results = [entry[0] for entry in part["outputs"]]
        elif kind == "constants":
            graph.constants = [_make_array(name, array.shape, array.dtype) for name, array in part["constants"]]

    contiguous = mx.contiguous
    mx.contiguous = _traceable_contiguous
    try:
        mx.export_function(note, all_of_it, *given)
    finally:
        mx.contiguous = contiguous
    for arrays in sooner:
        graph.computed_first.append(tuple(graph.results[: len(arrays)]))
        del graph.results[: len(arrays)]
    sooner.clear()
    return graph


def _traceable_contiguous(array: mx.array, *_: Any, **__: Any) -> mx.array:
    """Stand in for `mx.contiguous`, which MLX cannot export: two reshapes copy what it copies and nothing else."""
    return array.reshape(-1).reshape(array.shape)


def _make_array(name: str, shape: Sequence[int], dtype: mx.Dtype) -> GraphArray:
    """Return the `GraphArray` of an entry of the trace."""
    return GraphArray(name, tuple(shape), dtype.size)


# Its evaluation.


MAX_TAPE_WIDTH = 20
"""Bound of the arrays on the tape whose inputs are not on it yet."""

MAX_CALLS_AHEAD = 100
"""Bound of the calls by which the allocating thread is ahead of the computing one."""

_REUSE_SLACK = 16384
"""Bytes by which a reused buffer may be larger than the result."""

_UPDATE_KINDS = ("Scatter", "SliceUpdate", "ScatterAxis", "DynamicSliceUpdate")
_PRODUCT_KINDS = ("Matmul", "AddMM")
_ELEMENTWISE_KINDS = frozenset(
    (
        *("Abs", "Add", "AsType", "Cos", "Divide", "Equal", "Erf", "Exp", "Floor", "Greater", "GreaterEqual", "Less"),
        *("LessEqual", "Log", "Log1p", "LogAddExp", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum"),
        *("Multiply", "Negative", "NotEqual", "Power", "Remainder", "Select", "Sigmoid", "Sign", "Sin", "Softmax"),
        *("Sqrt", "Square", "Subtract", "Tanh"),
    )
)


@dataclass(eq=False)
class _Buffer:
    """A buffer of memory that arrays of the graph lie in."""

    nbytes: int

    is_owned: bool = True
    """The evaluation allocated it. False for arguments and constants, and once it is freed."""

    arrays: int = 0
    """Arrays of the graph that lie in it and are still needed."""

    calls: int = 0
    """Calls that read it and are not computed yet."""


@dataclass(frozen=True)
class _PlacedArray:
    """An array of the graph, with the buffer that it lies in."""

    memory: _Buffer
    shape: Shape
    strides: Shape
    itemsize: int


def peak_bytes(graph: Graph, updated: Collection[str] = ()) -> int:
    """Return the peak bytes of evaluating a graph. Results and constants count, the arguments do not. Arguments whose
    names are in `updated` are written in place; all others are copied before they change.
    """
    return _Replay(graph, updated).peak


class _Replay:
    """Replays how MLX allocates and frees buffers while it evaluates a graph, and notes the peak."""

    def __init__(self, graph: Graph, updated: Collection[str]) -> None:
        self.live = self.peak = sum(array.nbytes for array in graph.constants)
        self._uses = Counter(name for operation in graph.operations for name in operation.inputs)
        self._uses.update(graph.results)
        self._updated = frozenset(updated)
        self._placed: dict[str, _PlacedArray] = {}
        self._ahead: deque[tuple[int, list[_Buffer]]] = deque()
        self._calls = 0
        for array in (*graph.arguments, *graph.constants):
            self._place_array(array, _Buffer(array.nbytes, is_owned=False), dense_strides(array.shape))
        for operation in _evaluation_order(graph):
            self._replay_operation(operation)

    def _replay_operation(self, operation: Operation) -> None:
        """Allocate the outputs of an operation, and free the buffers that nothing needs any more."""
        takes = [self._placed[name] for name in operation.inputs]
        calls, copies = self._place_outputs(operation, takes)
        made = {id(self._placed[array.name].memory) for array in operation.outputs}
        held = list({id(p.memory): p.memory for p in takes if id(p.memory) not in made}.values()) + copies
        for memory in held:
            memory.calls += 1
        for name, place in zip(operation.inputs, takes, strict=True):
            self._uses[name] -= 1
            if not self._uses[name]:
                place.memory.arrays -= 1
        self._free_unused(place.memory for place in takes)
        self._ahead.append((calls, held))
        self._calls += calls
        while self._calls > MAX_CALLS_AHEAD:
            calls, held = self._ahead.popleft()
            self._calls -= calls
            for memory in held:
                memory.calls -= 1
            self._free_unused(held)

    def _place_outputs(self, operation: Operation, takes: list[_PlacedArray]) -> tuple[int, list[_Buffer]]:
        """Place the outputs of an operation. Return how many calls it takes, and the copies that these calls need."""
        kind, first = operation.kind, takes[0] if takes else None
        if kind in VIEW_KINDS and first is not None:
            for array in operation.outputs:
                strides = view_strides(kind, operation.arguments, first.shape, first.strides, array.shape)
                self._place_array(array, first.memory if strides is not None else self._allocate(array.nbytes), strides)
            return 1, []
        if kind in _UPDATE_KINDS and first is not None:
            (array,) = operation.outputs
            in_place = operation.inputs[0] in self._updated or self._is_free(operation, 0, takes)
            self._updated |= {array.name} if operation.inputs[0] in self._updated else set()
            self._place_array(array, first.memory if in_place else self._allocate(array.nbytes), None)
            return 3, []
        operands = takes[:2] if kind in _PRODUCT_KINDS else []
        copied = [p for p in operands if not multiplies_without_copy(p.shape, p.strides)]
        copies = [self._allocate(GraphArray("", p.shape, p.itemsize).nbytes) for p in copied]
        for array in operation.outputs:
            taken_over = self._reusable_input(operation, array, takes) if kind in _ELEMENTWISE_KINDS else None
            self._place_array(array, taken_over or self._allocate(array.nbytes), None)
        return 2 + len(copies), copies

    def _reusable_input(self, operation: Operation, array: GraphArray, takes: list[_PlacedArray]) -> _Buffer | None:
        """Return the buffer of an input that an elementwise operation reuses for its result; None if there is none."""
        for index, place in enumerate(takes):
            fits = place.shape == array.shape and place.itemsize == array.itemsize
            fits = fits and is_dense(place.shape, place.strides) and place.memory.nbytes <= array.nbytes + _REUSE_SLACK
            if fits and self._is_free(operation, index, takes):
                return place.memory
        return None

    def _is_free(self, operation: Operation, index: int, takes: list[_PlacedArray]) -> bool:
        """Whether only this operation still uses the buffer of its input `index`."""
        memory = takes[index].memory
        return memory.is_owned and memory.arrays == 1 and not memory.calls and self._uses[operation.inputs[index]] == 1

    def _place_array(self, array: GraphArray, memory: _Buffer, strides: Shape | None) -> None:
        """Note the buffer in which an array lies; without `strides`, it is contiguous."""
        self._placed[array.name] = _PlacedArray(
            memory, array.shape, strides or dense_strides(array.shape), array.itemsize
        )
        memory.arrays += bool(self._uses[array.name])

    def _allocate(self, nbytes: int) -> _Buffer:
        """Return a new buffer, and update the live and the peak bytes."""
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        return _Buffer(nbytes)

    def _free_unused(self, memories: Iterable[_Buffer]) -> None:
        """Free those of the buffers that nothing needs any more."""
        for memory in memories:
            if memory.is_owned and not memory.arrays and not memory.calls:
                self.live -= memory.nbytes
                memory.is_owned = False


def _evaluation_order(graph: Graph) -> list[Operation]:
    """Return the operations in the order in which MLX computes them."""
    maker = {array.name: index for index, operation in enumerate(graph.operations) for array in operation.outputs}
    needs = [[maker[name] for name in operation.inputs if name in maker] for operation in graph.operations]
    done: set[int] = set()
    order: list[int] = []
    for roots in (*graph.computed_first, graph.results):
        part = _evaluation_tape(needs, [maker[name] for name in roots if name in maker], done)
        done.update(part)
        order += part
    return [graph.operations[index] for index in order]


def _evaluation_tape(needs: list[list[int]], roots: list[int], done: set[int]) -> list[int]:
    """Return the operations, by index, that the roots need and that are not `done`, in MLX's order of evaluation."""
    end = -1
    of = {end: [root for root in roots if root not in done]}
    stack = [end]
    while stack:
        for need in of[stack.pop()]:
            if need not in of:
                of[need] = [index for index in needs[need] if index not in done]
                stack.append(need)
    degree = Counter(need for each in of.values() for need in each)
    tape, place = [end], 0
    waiting: list[tuple[int, int]] = []
    while degree and (place < len(tape) or waiting):
        if place < len(tape):
            index, begin = tape[place], 0
            place += 1
        else:
            index, begin = waiting.pop()
        for each in range(begin, len(of[index])):
            if len(tape) - place >= MAX_TAPE_WIDTH:
                waiting.append((index, each))
                break
            need = of[index][each]
            degree[need] -= 1
            if not degree[need]:
                del degree[need]
                tape.append(need)
    return tape[:0:-1]


# Strides, in numbers and not bytes, and which operations return a view instead of a copy.


Shape = tuple[int, ...]

_DUMMY = np.zeros(1, np.int8)

RESHAPE_KINDS = ("Reshape", "Unflatten", "Flatten", "Squeeze", "ExpandDims")
SAME_LAYOUT_KINDS = ("Copy", "StopGradient", "Split")
VIEW_KINDS = (*RESHAPE_KINDS, *SAME_LAYOUT_KINDS, "Transpose", "Broadcast", "Slice", "Contiguous", "AsStrided")
"""The operations whose result may be a view of their input."""


def dense_strides(shape: Sequence[int]) -> Shape:
    """Return the strides of a contiguous array, in elements."""
    strides = []
    step = 1
    for count in reversed(shape):
        strides.append(step)
        step *= count
    return tuple(reversed(strides))


def is_dense(shape: Shape, strides: Shape) -> bool:
    """Whether an array is contiguous."""
    return all(count == 1 or a == b for count, a, b in zip(shape, strides, dense_strides(shape), strict=True))


def multiplies_without_copy(shape: Shape, strides: Shape) -> bool:
    """Whether MLX's CPU build multiplies with an array without a copy: its matrices are contiguous or transposed."""
    if len(shape) < 2:
        return True
    (rows, columns), (down, across) = shape[-2:], strides[-2:]
    plain = across == 1 and (down == columns or rows == 1)
    return plain or (down == 1 and (across == rows or columns == 1))


def view_strides(kind: str, settings: Sequence[Any], shape: Shape, strides: Shape, result: Shape) -> Shape | None:
    """Return the strides of the view that an operation of `VIEW_KINDS` returns; None if it has to copy."""
    if kind == "Transpose":
        return tuple(strides[axis] for axis in settings[0])
    if kind == "Broadcast":
        new = len(result) - len(shape)
        return (0,) * new + tuple(
            0 if count != wide else step for count, wide, step in zip(shape, result[new:], strides, strict=True)
        )
    if kind == "Slice":
        return tuple(step * by for step, by in zip(strides, settings[2], strict=True))
    if kind == "Contiguous":
        return strides if is_dense(shape, strides) else None
    if kind in SAME_LAYOUT_KINDS:
        return strides
    if kind == "AsStrided":
        return dense_strides(result)
    return _reshaped_strides(shape, strides, result)


def _reshaped_strides(shape: Shape, strides: Shape, result: Shape) -> Shape | None:
    """Return the strides of a reshaped view by NumPy's rule, without reading memory; None if there is no view."""
    if 0 in result:
        return dense_strides(result)
    view = np.lib.stride_tricks.as_strided(_DUMMY, shape, strides)
    try:
        view.shape = result
    except (AttributeError, ValueError):
        return None
    return tuple(view.strides)
