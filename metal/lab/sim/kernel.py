"""`metal_kernel`: the constructor and call of `mx.fast.metal_kernel`, executed on the CPU."""

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.errors import KernelCompileError
from cortexmlx.metal.lab import legal
from cortexmlx.metal.lab.legal.msl import PREAMBLE
from cortexmlx.metal.lab.sim import settings
from cortexmlx.metal.lab.sim.buffers import MAX_ALIGNMENT, BufferSpec, LaunchSpec, SparseArray, host_view, offset_of
from cortexmlx.metal.lab.sim.cpp import translation_unit
from cortexmlx.metal.lab.sim.launch import run
from cortexmlx.metal.lab.sim.report import LaunchReport
from cortexmlx.metal.lab.sim.source import BufferParam, KernelText, Role, TemplateArgs, generate
from cortexmlx.metal.lab.sim.toolchain import Build, build, cache_folder, content_key
from cortexmlx.types.arrays import dtype_name

Scalar = bool | int | float
HostView = npt.NDArray[np.generic] | SparseArray
MATH_MODES = ("safe", "relaxed", "fast")
_MATH_MODES = {("math_mode", mode) for mode in MATH_MODES}


def _memory_span(view: npt.NDArray[np.generic]) -> tuple[npt.NDArray[np.generic], int]:
    """Return a view's memory from its lowest to its highest element, and the offset in bytes of its first."""
    if view.flags.c_contiguous:
        return view.reshape(-1), 0
    spans = [(n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True)]
    below = -sum(span for span in spans if span < 0)
    count = (below + sum(span for span in spans if span > 0)) // view.itemsize + 1
    lowest = view[tuple(slice(-1, None) if span < 0 else slice(0, 1) for span in spans)]
    return np.lib.stride_tricks.as_strided(lowest, (count,), (view.itemsize,)), below


def to_array(data: npt.NDArray[np.uint8], shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Return bytes as an MLX array."""
    if dtype == mx.bfloat16:
        return mx.array(data.view(np.uint16).reshape(shape)).view(mx.bfloat16)
    return mx.array(data.view(numpy_type(dtype)).reshape(shape))


def numpy_type(dtype: mx.Dtype) -> np.dtype[Any]:
    """Return the NumPy type of the same size; for bfloat16, uint16."""
    return np.dtype("uint16" if dtype == mx.bfloat16 else dtype_name(dtype).rstrip("_"))


class MetalKernel:
    """A kernel that runs on the simulator. It has the constructor and the call of MLX's kernels.

    `last_report` is the LaunchReport of the most recent call.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: Mapping[str, str] | None = None,
    ) -> None:
        if unknown := set((compile_options or {}).items()) - _MATH_MODES:
            raise ValueError(
                f"[metal_kernel] unknown compile options {sorted(unknown)}: 'math_mode' may be {MATH_MODES}."
            )
        if not output_names:
            raise ValueError("[metal_kernel] Must specify at least one output.")
        self.name = name
        self.input_names = tuple(input_names)
        self.output_names = tuple(output_names)
        self.source = source
        self.header = header
        self.ensure_row_contiguous = ensure_row_contiguous
        self.atomic_outputs = atomic_outputs
        self.last_report: LaunchReport | None = None
        self._libraries: dict[tuple[str, bool, Build], Path] = {}

    def text(
        self,
        inputs: Sequence[mx.array | SparseArray],
        output_dtypes: Sequence[mx.Dtype],
        template: TemplateArgs | None = None,
    ) -> KernelText:
        """Return the Metal text that MLX would compile for these inputs."""
        return generate(
            self.name,
            self.header,
            self.source,
            list(zip(self.input_names, inputs, strict=True)),
            list(zip(self.output_names, output_dtypes, strict=True)),
            template,
            self.atomic_outputs,
        )

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | SparseArray | Scalar],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: TemplateArgs | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """Run the kernel now and return its outputs, evaluated.

        Raises:
            ValueError: the number of inputs, output shapes or output dtypes is wrong.
            KernelCompileError: the text does not compile.
            KernelFault: a thread did something that a GPU does not define.
        """
        if len(inputs) != len(self.input_names):
            raise ValueError(
                f"[metal_kernel] {self.name} takes {len(self.input_names)} inputs, {len(inputs)} were given."
            )
        if not len(output_shapes) == len(output_dtypes) == len(self.output_names):
            raise ValueError(
                f"[metal_kernel] {self.name} has {len(self.output_names)} outputs, "
                f"{len(output_shapes)} shapes and {len(output_dtypes)} dtypes were given."
            )
        arrays = [x if isinstance(x, mx.array | SparseArray) else mx.array(x) for x in inputs]
        kernel = self.text(arrays, output_dtypes, template)
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```\n{kernel.text}\n```")
        current = settings.current()
        library = self._build_library(kernel, current)
        views = dict(zip(self.input_names, map(self._host_view, arrays), strict=True))
        outputs = dict(zip(self.output_names, zip(output_shapes, output_dtypes, strict=True), strict=True))
        offsets = {name: self._bound_offset(array) for name, array in zip(self.input_names, arrays, strict=True)}
        dtypes = {name: array.dtype for name, array in zip(self.input_names, arrays, strict=True)}
        specs = [_make_buffer_spec(p, views, offsets, dtypes, outputs, init_value) for p in kernel.buffers]
        threads = (grid[0], grid[1], grid[2]), (threadgroup[0], threadgroup[1], threadgroup[2])
        zeroed = build(translation_unit(kernel), Build.ZEROED) if current.poison else None
        launched = run(LaunchSpec(self.name, kernel.text, specs, *threads), library, current, zeroed)
        self.last_report = launched.report
        return [
            to_array(data, shape, dtype)
            for data, (shape, dtype) in zip(launched.outputs, outputs.values(), strict=True)
        ]

    def _build_library(self, kernel: KernelText, current: settings.SimSettings) -> Path:
        key = (kernel.text, current.static_pass, current.build)
        if key not in self._libraries:
            if current.static_pass:
                refuse_illegal_text(self.name, kernel.text)
            self._libraries[key] = build(translation_unit(kernel), current.build)
        return self._libraries[key]

    def _host_view(self, array: mx.array | SparseArray) -> HostView:
        if isinstance(array, SparseArray):
            return array
        view = host_view(array)
        return np.ascontiguousarray(view).reshape(view.shape) if self.ensure_row_contiguous else view

    def _bound_offset(self, array: mx.array | SparseArray) -> int:
        """Return the offset in bytes of what MLX would bind: the array in place, or a copy (0)."""
        copied = isinstance(array, mx.array) and self.ensure_row_contiguous and not host_view(array).flags.c_contiguous
        return 0 if copied or isinstance(array, SparseArray) else offset_of(array)


def _array_name(p: BufferParam) -> str:
    suffix = {Role.SHAPE: "_shape", Role.STRIDES: "_strides", Role.NDIM: "_ndim"}.get(p.role, "")
    return p.name.removesuffix(suffix)


def _strides(view: HostView) -> list[int]:
    """Return a view's strides, in elements."""
    return view.strides() if isinstance(view, SparseArray) else [s // view.itemsize for s in view.strides]


def _make_buffer_spec(
    p: BufferParam,
    views: dict[str, HostView],
    offsets: dict[str, int],
    dtypes: dict[str, mx.Dtype],
    outputs: dict[str, tuple[Sequence[int], mx.Dtype]],
    init_value: float | None,
) -> BufferSpec:
    if p.role is Role.OUTPUT:
        shape, dtype = outputs[p.name]
        host = numpy_type(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        filled = None
        if init_value is not None:
            filled = np.ascontiguousarray(host_view(mx.full((count,), init_value, dtype=dtype)))
        return BufferSpec(
            p.name, filled, count * host.itemsize, host.itemsize, writable=True, element=dtype_name(dtype)
        )
    view = views[_array_name(p)]
    if p.role is Role.INPUT:
        if isinstance(view, SparseArray):
            return BufferSpec(p.name, None, view.nbytes, view.dtype.size, pieces=tuple(view.pieces))
        data, start = _memory_span(view)
        offset = (offsets[p.name] - start) % MAX_ALIGNMENT
        element = dtype_name(dtypes[p.name])
        return BufferSpec(p.name, data, data.nbytes, data.itemsize, offset=offset, start=start, element=element)
    if p.role is Role.SHAPE:
        data = np.array(view.shape, dtype=np.int32)
    elif p.role is Role.STRIDES:
        data = np.array(_strides(view), dtype=np.int64)
    else:
        data = np.array([view.ndim], dtype=np.int32)
    return BufferSpec(p.name, data, data.nbytes, data.itemsize)


metal_kernel = MetalKernel
"""A drop-in for `mx.fast.metal_kernel` that runs on the CPU. Every math mode computes as "safe" does."""


# Refuse text that is valid C++ but not valid Metal, before it first runs.

SHOWN = 8


@cache
def _checker_source() -> str:
    """Return the source of the checker, for the cache key: another version may refuse other texts."""
    folder = Path(legal.__file__).parent
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".h")]
    return "".join(path.read_text() for path in files)


@cache
def _warn_once_unchecked() -> None:
    warnings.warn(
        "the simulator runs Metal text without judging whether Metal would take it: install the front end with "
        "`pip install libclang==18.1.1`",
        stacklevel=2,
    )


def refuse_illegal_text(name: str, text: str) -> None:
    """Refuse kernel text that a compiler of Metal 3.1 (macOS 14) would refuse. The cache keeps accepted texts.

    Without the libclang wheel nothing is checked, and one warning says so.

    Raises:
        KernelCompileError: Metal would refuse the text. The message has a sentence and the line for the first
            complaints.
    """
    if not legal.available():
        _warn_once_unchecked()
        return
    passed = cache_folder() / f"{content_key('legal', _checker_source(), PREAMBLE, text)}.ok"
    if passed.exists():
        return
    found = legal.complaints(text, legal.Language.METAL_3_1)
    if found:
        lines = text.splitlines()
        said = [f'{name}: line {c.line}: {c.message} ("{lines[c.line - 1].strip()[:90]}")' for c in found[:SHOWN]]
        raise KernelCompileError("\n".join(said))
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.touch()
