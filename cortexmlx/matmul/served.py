"""Makes a model's quantized modules use our kernel during steps, where `use` says so.

mlx-lm's model is used unchanged. Its quantized modules become instances of the classes here, which ask once per call.
Outside of a step, and for whatever the kernel does not serve, they are what they were.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from cortexmlx.attention.selfcheck import KernelApproval
from cortexmlx.matmul.selfcheck import check_matmul
from cortexmlx.metal.kernels import KernelFactory
from cortexmlx.metal.matmul.kernel import MatmulKernel, QuantizedWeights
from cortexmlx.metal.matmul.shape import MatmulShape, MatmulVariant, refusal, split_rows
from cortexmlx.metal.shape import DTYPES
from cortexmlx.system.machine import is_memory_refusal
from cortexmlx.types.arrays import dtype_name

_log = logging.getLogger(__name__)

Use = Callable[[MatmulShape, int], bool]
"""Whether our kernel computes a matmul: its shape, and its rows. With experts, a row is a token and one expert."""


class QuantizedMatmuls:
    """Computes a model's quantized matmuls by our kernel, during steps, where `use` says so. `factory` makes the
    kernel.

    With `check`, the kernel is compared with float64 at the first use of each variant, and disabled if it disagrees.
    Only the thread that evaluates the steps may use it.
    """

    def __init__(self, factory: KernelFactory, use: Use, *, check: bool = True) -> None:
        self.kernel = MatmulKernel(factory)
        self.use = use
        self._approval = KernelApproval(check, serves="matmuls", instead="MLX's own kernels")
        self._variant_approved: dict[tuple[Any, ...], bool] = {}
        self._served_shapes: dict[tuple[MatmulShape, int], bool] = {}
        self._modules: list[tuple[nn.Module, type]] = []
        self._in_step = False
        self.calls: list[tuple[nn.Module, mx.array]] | None = None
        """The calls of linear modules, while `share_inputs` looks for them."""

    def install(self, model: nn.Module) -> int:
        """Make a model's quantized modules use our kernel. Return how many of them it can serve. Safe to call again."""
        for _, module in model.named_modules():
            served_class = _SERVED.get(type(module))
            if served_class is None or (matmul := _make_matmul(self, module)) is None:
                continue
            self._modules.append((module, type(module)))
            module.matmul = matmul
            module.__class__ = served_class
        return len(self._modules)

    def share_inputs(self, run_lazily: Callable[[], object]) -> int:
        """Fuse linear modules that get the same array into one matmul for steps of a single row, as far as there is
        memory to join their weights. Return how many matmuls this saves a step. `run_lazily` builds a lazy pass.
        """
        self.calls = []
        try:
            run_lazily()
            groups = list(find_shared_inputs(self.calls))
        finally:
            self.calls = None  # its arrays are lazy, and would hold the separate weights
        saved = 0
        try:
            for modules in groups:
                shared = SharedInput(modules)
                for module in modules:
                    module.matmul.shared = shared
                saved += len(modules) - 1
                mx.clear_cache()  # of the separate weights: no other group is as large
        except Exception as error:
            if not is_memory_refusal(error):
                raise
            _log.info("no memory to join more weights: %s", error)
        return saved

    def keep_shared(self) -> None:
        """Give the modules that share no input their own classes back, because our kernel is not used for them."""
        kept = [entry for entry in self._modules if entry[0].matmul.shared is not None]
        self._modules = [entry for entry in self._modules if entry[0].matmul.shared is None]
        self.remove()
        self._modules = kept

    def remove(self) -> None:
        """Give the modules their own classes back. Safe to call again."""
        for module, kind in self._modules:
            module.__class__ = kind
            del module.matmul
        self._modules.clear()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enable our kernel for a model that is called in this context."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def modules(self, dtype: str) -> dict[MatmulShape, list[nn.Module]]:
        """Return the installed modules by the shape of their matmul with inputs of `dtype`."""
        modules_by_shape: dict[MatmulShape, list[nn.Module]] = {}
        for module, _ in self._modules:
            if (shape := module.matmul.shape_for(dtype)) is not None:
                modules_by_shape.setdefault(shape, []).append(module)
        return modules_by_shape

    def compute(self, shape: MatmulShape, module: nn.Module, x: mx.array, experts: mx.array) -> mx.array:
        """Compute a module's matmul by our kernel. `experts` has the expert of each row, if the shape has experts."""
        if shape.experts is None:
            return self.kernel(shape, x, _get_weights(module))
        return self.kernel.multiply_experts(shape, x, _get_weights(module), experts)

    def notes(self) -> tuple[str, ...]:
        """Return a line for each kind of matmul that MLX's kernels compute instead, with the reason."""
        return tuple(f"{label}: {reason}" for label, reason in self._approval.notes.items())

    def reconsider(self) -> None:
        """Forget all checks after a failed step: every variant is checked again at its next use."""
        self._variant_approved.clear()
        self._served_shapes.clear()
        self._approval.reconsider()
        for module, _ in self._modules:
            if module.matmul.shared is not None:
                module.matmul.shared.forget()

    def shares(self, rows: int) -> bool:
        """Return whether modules with the same input are fused now: in a step, if it has a single row."""
        return rows == 1 and self._in_step

    def serves(self, shape: MatmulShape, rows: int) -> bool:
        """Return whether our kernel computes a matmul now: in a step, chosen and approved."""
        if not self._in_step or not self.use(shape, rows):
            return False
        is_served = self._served_shapes.get((shape, rows))
        if is_served is None:
            is_served = self._served_shapes[shape, rows] = self.approves(shape, rows)
        return is_served

    def approves(self, shape: MatmulShape, rows: int) -> bool:
        """Return whether our kernel can compute a matmul, and its variant agreed with float64 in a check."""
        if refusal(shape, rows) is not None:
            return False
        row_split = split_rows(rows) if shape.experts is None else None
        variant = (shape.dtype, shape.mode, shape.bits, shape.group, shape.slices, row_split)
        if variant not in self._variant_approved:
            check = lambda: check_matmul(self.kernel, shape, rows)  # noqa: E731
            self._variant_approved[variant] = self._approval.is_approved(MatmulVariant(shape, rows), None, check)
        return self._variant_approved[variant]


class _ModuleMatmul:
    """The matmul of one module: its shape for each dtype of rows, and the calls of our kernel."""

    def __init__(self, matmuls: QuantizedMatmuls, shapes: Iterable[MatmulShape]) -> None:
        self.matmuls = matmuls
        self._shapes = {getattr(mx, shape.dtype): shape for shape in shapes}
        self.shared: SharedInput | None = None
        """The joint matmul of this module and others that get the same array."""

    def shape_for(self, dtype: str) -> MatmulShape | None:
        """Return the matmul's shape with rows of `dtype`; None if the kernel cannot multiply them."""
        return self._shapes.get(getattr(mx, dtype))

    def multiply(self, module: nn.Module, x: mx.array) -> mx.array | None:
        """Return the matmul of `x` `[..., inputs]` by our kernel or as part of a joint one. None: MLX computes it."""
        if self.matmuls.calls is not None:
            self.matmuls.calls.append((module, x))
        shape = self._shapes.get(x.dtype)
        if shape is None:
            return None
        rows = x.size // shape.inputs
        if self.shared is not None and self.matmuls.shares(rows):
            return self.shared.part(module, x)
        return self.matmuls.kernel(shape, x, _get_weights(module)) if self.matmuls.serves(shape, rows) else None

    def multiply_experts(self, module: nn.Module, x: mx.array, experts: mx.array) -> mx.array | None:
        """Return the matmul of `x` `[..., 1, inputs]` with the matrices of `experts`, which has the shape `[...]` or
        several for each row, as `mx.gather_qmm` does. Return None if MLX computes it.
        """
        shape, batch = self._shapes.get(x.dtype), tuple(x.shape[:-2])
        shapes_match = x.shape[-2] == 1 and batch in (tuple(experts.shape), (*experts.shape[:-1], 1))
        if shape is None or not shapes_match or not self.matmuls.serves(shape, experts.size):
            return None
        matmul = self.matmuls.kernel.multiply_experts(shape, x, _get_weights(module), experts)
        return matmul.reshape(*experts.shape, 1, shape.outputs)


class _ServedLinear(nn.QuantizedLinear):  # type: ignore[misc]
    """A quantized linear layer that our kernel computes where it can."""

    matmul: _ModuleMatmul

    def __call__(self, x: mx.array) -> mx.array:
        if (matmul := self.matmul.multiply(self, x)) is not None:
            return matmul + self["bias"] if "bias" in self else matmul
        mlx_output: mx.array = super().__call__(x)
        return mlx_output


class _ServedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """A quantized embedding whose `as_linear` our kernel computes where it can."""

    matmul: _ModuleMatmul

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits of `x`, by our kernel or by MLX."""
        if (matmul := self.matmul.multiply(self, x)) is not None:
            return matmul
        mlx_output: mx.array = super().as_linear(x)
        return mlx_output


class _ServedSwitchLinear(QuantizedSwitchLinear):  # type: ignore[misc]
    """A quantized layer of experts that our kernel computes where it can."""

    matmul: _ModuleMatmul

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if (matmul := self.matmul.multiply_experts(self, x, indices)) is not None:
            return matmul + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else matmul
        mlx_output: mx.array = super().__call__(x, indices, sorted_indices)
        return mlx_output


_SERVED: dict[type, type] = {
    nn.QuantizedLinear: _ServedLinear,
    nn.QuantizedEmbedding: _ServedEmbedding,
    QuantizedSwitchLinear: _ServedSwitchLinear,
}
"""The modules that are served. A subclass of theirs computes in a way of its own, and is left alone."""


def _get_weights(module: nn.Module) -> QuantizedWeights:
    return QuantizedWeights(module["weight"], module["scales"], module.get("biases"))


def _make_matmul(matmuls: QuantizedMatmuls, module: nn.Module) -> _ModuleMatmul | None:
    """Return a module's matmul; None if our kernel cannot serve it."""
    weights = _get_weights(module)
    *experts, outputs, words = weights.codes.shape
    # Affine scales have the dtype of the model. Those of MXFP4 say nothing of it.
    dtypes = (dtype_name(weights.scales.dtype),) if module.mode == "affine" else DTYPES
    shapes = [
        MatmulShape(
            dtype,
            module.mode,
            module.bits,
            module.group_size,
            words * 32 // module.bits,
            outputs,
            experts[0] if experts else None,
        )
        for dtype in dtypes
    ]
    if module.get("global_scale") is not None or refusal(shapes[0], 1) is not None:
        return None
    # MLX would silently copy such weights at each call.
    if any(not memoryview(array).c_contiguous for array in weights.arrays):  # type: ignore[arg-type]
        _log.warning("matmuls (%s) run on MLX's own kernels: the weights are not contiguous", shapes[0].label)
        return None
    return _ModuleMatmul(matmuls, shapes)


ALIGNED_OUTPUTS = 8
"""MLX's fast matmul for a lone row computes so many outputs together. The outputs of each module are a multiple."""


class SharedInput:
    """The fused matmul of several quantized linear modules that a model calls one after the other with the same array,
    such as the projections to queries, keys and values. For a single row they are one matmul, launched once.

    Nobody lists the modules: a lazy pass shows which get the same array. Their quantized weights are joined along the
    outputs, and each module keeps a view of its part. So nothing takes more memory, and with more rows each module
    computes its own matmul from its own weights, as before. There a part of a joint matmul would have to be copied.

    MLX's matmul of a lone row computes each output by itself, in the same order. So a row's numbers have the same
    bits.
    """

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
        self._weight_format = {"group_size": modules[0].group_size, "bits": modules[0].bits, "mode": modules[0].mode}
        self._input: mx.array | None = None
        self._output: mx.array | None = None
        self._waiting: set[int] = set()

    def forget(self) -> None:
        """Drop the shared input and its matmul, after a step that failed."""
        self._input = self._output = None

    def part(self, module: nn.Module, x: mx.array) -> mx.array:
        """Return a module's matmul with a single row `x`, without bias. The first module computes it for all."""
        if self._input is not x or id(module) not in self._waiting:
            self._input, self._waiting = x, set(self._ends)
            weights, scales, biases = self._joined["weight"], self._joined["scales"], self._joined.get("biases")
            self._output = mx.quantized_matmul(x, weights, scales, biases, **self._weight_format)
        assert self._output is not None
        begin, end = self._ends[id(module)]
        part = self._output[..., begin:end]
        self._waiting.discard(id(module))
        if not self._waiting:
            self.forget()
        return part


def find_shared_inputs(calls: Sequence[tuple[nn.Module, mx.array]]) -> Iterator[list[nn.Module]]:
    """Yield each group of consecutive modules that get the same array and whose weights can be joined. `calls` are
    those of a pass, in order, with their arrays.
    """
    counts = Counter(id(module) for module, _ in calls)
    for _, same in groupby(calls, key=lambda call: (id(call[1]), _weight_format(call[0]))):
        modules = [
            module for module, _ in same if counts[id(module)] == 1 and module["weight"].shape[0] % ALIGNED_OUTPUTS == 0
        ]
        if len(modules) > 1:
            yield modules


def _weight_format(module: nn.Module) -> tuple[object, ...]:
    """Return the format that the weights of modules must have in common to be joined."""
    scales = module["scales"]
    return module.mode, module.bits, module.group_size, module["weight"].shape[1:], scales.dtype, "biases" in module
