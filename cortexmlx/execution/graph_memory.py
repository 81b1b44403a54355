"""Predicts the memory that MLX takes to evaluate a computation graph, from the graph alone: nothing is computed.

Read in MLX's source (`transforms.cpp`, `backend/cpu/eval.cpp` and `encoder.h`, 0.32): the graph becomes a tape in
breadth-first order of at most `MAX_TAPE_WIDTH` arrays, which is computed from its end; of a graph that is handed over
in parts, each part becomes one. The thread that walks the tape allocates the results; another one computes them, at
most ten tasks of ten calls later, and only then what they were made of is given back. An array that nobody else holds
becomes the result of an elementwise operation on it.

No formula takes its place. What is alive between two operations is 0.22 to 1.4 times the peak of this replay, and with
all results of the last 50 operations 0.5 to 2.7 times, for the models and steps of the table in docs/memory.md.
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
    """An array of a traced graph. `name` is its name in the trace."""

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
    function: Callable[..., Sequence[mx.array]],
    *inputs: mx.array,
    computed_first: list[tuple[mx.array, ...]] | None = None,
) -> Graph:
    """Return the computation graph of `function(*inputs)`. Nothing is computed, not even the arguments. The function
    may append to `computed_first` the arrays that are computed before the rest. Raises ValueError for what MLX cannot
    export.
    """
    graph = Graph()
    first_arrays: list[tuple[mx.array, ...]] = [] if computed_first is None else computed_first

    def compute_all(*arguments: mx.array) -> list[mx.array]:
        results = list(function(*arguments))
        return [*(array for arrays in first_arrays for array in arrays), *results]

    def add_to_graph(part: dict[str, Any]) -> None:
        kind = part["type"]
        if kind == "primitive":
            input_names = tuple(entry[0] for entry in part["inputs"])
            outputs = tuple(_make_array(*entry) for entry in part["outputs"])
            graph.operations.append(Operation(part["name"], input_names, outputs, part.get("arguments", ())))
        elif kind == "inputs":
            graph.arguments = [_make_array(*entry) for entry in part["inputs"]]
        elif kind == "outputs":
            graph.results = [entry[0] for entry in part["outputs"]]
        elif kind == "constants":
            graph.constants = [_make_array(name, array.shape, array.dtype) for name, array in part["constants"]]

    contiguous = mx.contiguous
    mx.contiguous = _traceable_contiguous
    try:
        mx.export_function(add_to_graph, compute_all, *inputs)
    finally:
        mx.contiguous = contiguous
    for arrays in first_arrays:
        graph.computed_first.append(tuple(graph.results[: len(arrays)]))
        del graph.results[: len(arrays)]
    first_arrays.clear()
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


def peak_bytes(graph: Graph, updated_names: Collection[str] = (), *, waits: bool = False) -> int:
    """Return the peak bytes of evaluating a graph. Results and constants count, the arguments do not. Arguments whose
    names are in `updated_names` are written in place; all others are copied before they change. With `waits`, each
    part of the graph is computed before the next is begun.
    """
    return _Replay(graph, updated_names, waits).peak


class _Replay:
    """Replays how MLX allocates and frees buffers while it evaluates a graph, and notes the peak."""

    def __init__(self, graph: Graph, updated_names: Collection[str], waits: bool) -> None:
        self.live_bytes = self.peak = sum(array.nbytes for array in graph.constants)
        self._uses = Counter(name for operation in graph.operations for name in operation.inputs)
        self._uses.update(graph.results)
        self._updated_names = frozenset(updated_names)
        self._placed_arrays: dict[str, _PlacedArray] = {}
        self._pending_calls: deque[tuple[int, list[_Buffer]]] = deque()
        self._calls = 0
        for array in (*graph.arguments, *graph.constants):
            self._place_array(array, _Buffer(array.nbytes, is_owned=False), dense_strides(array.shape))
        for part in _evaluation_order(graph):
            for operation in part:
                self._replay_operation(operation)
            if waits:
                self._await_calls(0)

    def _replay_operation(self, operation: Operation) -> None:
        """Allocate the outputs of an operation, and free the buffers that nothing needs any more."""
        placed_inputs = [self._placed_arrays[name] for name in operation.inputs]
        calls, copies = self._place_outputs(operation, placed_inputs)
        output_buffer_ids = {id(self._placed_arrays[array.name].memory) for array in operation.outputs}
        held_buffers = (
            list({id(p.memory): p.memory for p in placed_inputs if id(p.memory) not in output_buffer_ids}.values())
            + copies
        )
        for memory in held_buffers:
            memory.calls += 1
        for name, placed_input in zip(operation.inputs, placed_inputs, strict=True):
            self._uses[name] -= 1
            if not self._uses[name]:
                placed_input.memory.arrays -= 1
        self._free_unused(place.memory for place in placed_inputs)
        self._pending_calls.append((calls, held_buffers))
        self._calls += calls
        self._await_calls(MAX_CALLS_AHEAD)

    def _await_calls(self, ahead: int) -> None:
        """Let the oldest calls end, and free what they needed, until at most `ahead` calls are left to be computed."""
        while self._calls > ahead:
            calls, held_buffers = self._pending_calls.popleft()
            self._calls -= calls
            for memory in held_buffers:
                memory.calls -= 1
            self._free_unused(held_buffers)

    def _place_outputs(self, operation: Operation, placed_inputs: list[_PlacedArray]) -> tuple[int, list[_Buffer]]:
        """Place the outputs of an operation. Return how many calls it takes, and the copies that these calls need."""
        kind, first = operation.kind, placed_inputs[0] if placed_inputs else None
        if kind in VIEW_KINDS and first is not None:
            for array in operation.outputs:
                strides = view_strides(kind, operation.arguments, first.shape, first.strides, array.shape)
                self._place_array(array, first.memory if strides is not None else self._allocate(array.nbytes), strides)
            return 1, []
        if kind in _UPDATE_KINDS and first is not None:
            (array,) = operation.outputs
            in_place = operation.inputs[0] in self._updated_names or self._is_free(operation, 0, placed_inputs)
            self._updated_names |= {array.name} if operation.inputs[0] in self._updated_names else set()
            self._place_array(array, first.memory if in_place else self._allocate(array.nbytes), None)
            return 3, []
        operands = placed_inputs[:2] if kind in _PRODUCT_KINDS else []
        copied_operands = [p for p in operands if not multiplies_without_copy(p.shape, p.strides)]
        copies = [self._allocate(GraphArray("", p.shape, p.itemsize).nbytes) for p in copied_operands]
        for array in operation.outputs:
            taken_over = self._reusable_input(operation, array, placed_inputs) if kind in _ELEMENTWISE_KINDS else None
            self._place_array(array, taken_over or self._allocate(array.nbytes), None)
        return 2 + len(copies), copies

    def _reusable_input(
        self, operation: Operation, array: GraphArray, placed_inputs: list[_PlacedArray]
    ) -> _Buffer | None:
        """Return the buffer of an input that an elementwise operation reuses for its result; None if there is none."""
        for index, placed_input in enumerate(placed_inputs):
            is_reusable = placed_input.shape == array.shape and placed_input.itemsize == array.itemsize
            is_reusable = (
                is_reusable
                and is_dense(placed_input.shape, placed_input.strides)
                and placed_input.memory.nbytes <= array.nbytes + _REUSE_SLACK
            )
            if is_reusable and self._is_free(operation, index, placed_inputs):
                return placed_input.memory
        return None

    def _is_free(self, operation: Operation, index: int, placed_inputs: list[_PlacedArray]) -> bool:
        """Return whether only this operation still uses the buffer of its input `index`."""
        memory = placed_inputs[index].memory
        return memory.is_owned and memory.arrays == 1 and not memory.calls and self._uses[operation.inputs[index]] == 1

    def _place_array(self, array: GraphArray, memory: _Buffer, strides: Shape | None) -> None:
        """Note the buffer in which an array lies; without `strides`, it is contiguous."""
        self._placed_arrays[array.name] = _PlacedArray(
            memory, array.shape, strides or dense_strides(array.shape), array.itemsize
        )
        memory.arrays += bool(self._uses[array.name])

    def _allocate(self, nbytes: int) -> _Buffer:
        """Return a new buffer, and update the live and the peak bytes."""
        self.live_bytes += nbytes
        self.peak = max(self.peak, self.live_bytes)
        return _Buffer(nbytes)

    def _free_unused(self, memories: Iterable[_Buffer]) -> None:
        """Free the buffers among `memories` that nothing needs any more."""
        for memory in memories:
            if memory.is_owned and not memory.arrays and not memory.calls:
                self.live_bytes -= memory.nbytes
                memory.is_owned = False


def _evaluation_order(graph: Graph) -> list[list[Operation]]:
    """Return the operations in the order in which MLX computes them, part by part."""
    producer = {array.name: index for index, operation in enumerate(graph.operations) for array in operation.outputs}
    dependencies = [[producer[name] for name in operation.inputs if name in producer] for operation in graph.operations]
    evaluated: set[int] = set()
    parts: list[list[Operation]] = []
    for roots in (*graph.computed_first, graph.results):
        part = _evaluation_tape(dependencies, [producer[name] for name in roots if name in producer], evaluated)
        evaluated.update(part)
        parts.append([graph.operations[index] for index in part])
    return parts


def _evaluation_tape(dependencies: list[list[int]], roots: list[int], evaluated: set[int]) -> list[int]:
    """Return the operations, by index, that the roots need and that are not `evaluated`, in MLX's order."""
    end = -1
    open_dependencies = {end: [root for root in roots if root not in evaluated]}
    stack = [end]
    while stack:
        for dependency in open_dependencies[stack.pop()]:
            if dependency not in open_dependencies:
                open_dependencies[dependency] = [index for index in dependencies[dependency] if index not in evaluated]
                stack.append(dependency)
    degree = Counter(need for each in open_dependencies.values() for need in each)
    tape, position = [end], 0
    suspended: list[tuple[int, int]] = []
    while degree and (position < len(tape) or suspended):
        if position < len(tape):
            index, start = tape[position], 0
            position += 1
        else:
            index, start = suspended.pop()
        for each in range(start, len(open_dependencies[index])):
            if len(tape) - position >= MAX_TAPE_WIDTH:
                suspended.append((index, each))
                break
            dependency = open_dependencies[index][each]
            degree[dependency] -= 1
            if not degree[dependency]:
                del degree[dependency]
                tape.append(dependency)
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
    """Return whether an array is contiguous."""
    return all(count == 1 or a == b for count, a, b in zip(shape, strides, dense_strides(shape), strict=True))


def multiplies_without_copy(shape: Shape, strides: Shape) -> bool:
    """Return whether MLX's CPU build multiplies with an array without copying it: contiguous or transposed matrices."""
    if len(shape) < 2:
        return True
    (rows, columns), (row_stride, column_stride) = shape[-2:], strides[-2:]
    is_row_major = column_stride == 1 and (row_stride == columns or rows == 1)
    return is_row_major or (row_stride == 1 and (column_stride == rows or columns == 1))


def view_strides(kind: str, settings: Sequence[Any], shape: Shape, strides: Shape, result: Shape) -> Shape | None:
    """Return the strides of the view that an operation of `VIEW_KINDS` returns; None if it has to copy."""
    if kind == "Transpose":
        return tuple(strides[axis] for axis in settings[0])
    if kind == "Broadcast":
        new = len(result) - len(shape)
        return (0,) * new + tuple(
            0 if count != target_size else stride
            for count, target_size, stride in zip(shape, result[new:], strides, strict=True)
        )
    if kind == "Slice":
        return tuple(step * slice_step for step, slice_step in zip(strides, settings[2], strict=True))
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
    try:
        return np.reshape(np.lib.stride_tricks.as_strided(_DUMMY, shape, strides), result, copy=False).strides
    except ValueError:
        return None
