"""`mx.fast.cuda_kernel` where there is no NVIDIA GPU: its text runs on the CPU, or is kept for nvcc.

What runs is the CUDA text, with `cuda_host.h` for CUDA's words: warps exchange numbers, blocks meet at barriers, shared
memory begins as NaN. It says whether dialect, lanes and barriers are right; nothing of nvcc, of a GPU, or of races.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.metal.lab.sim.toolchain import RUNTIME, find_compiler

HERE = Path(__file__).parent
HEADERS = ("cuda_fp16.h", "cuda_bf16.h", "cuda/std/cstdint")
_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int",
    mx.uint8: "unsigned char",
    mx.uint32: "unsigned",
}
_FLAGS = ["-std=c++20", "-fPIC", "-O1", "-fno-exceptions", "-ftrivial-auto-var-init=pattern", "-Wno-everything"]


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class CudaText:
    """A kernel as one CUDA file: an `extern "C"` function of buffers, and of the shapes that the source names."""

    name: str
    text: str
    types: tuple[str, ...]
    shapes: tuple[bool, ...]

    @property
    def called(self) -> str:
        """For a CPU: a function that calls the kernel with an array of pointers."""
        arguments = ", ".join(f"({type_})of[{n}]" for n, type_ in enumerate(self.types))
        return (
            f'extern "C" __attribute__((visibility("default"))) void call(void** of) {{ {self.name}({arguments}); }}\n'
        )


def cuda_text(
    name: str,
    header: str,
    source: str,
    inputs: Sequence[tuple[str, mx.Dtype]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    template: Sequence[tuple[str, Any]],
) -> CudaText:
    """What MLX makes of a custom kernel, less its own headers; of a shape it passes the array itself."""
    parameters: list[tuple[str, str]] = []
    shapes = tuple(f"{name}_shape" in source for name, _ in inputs)
    for (buffer, dtype), shape in zip(inputs, shapes, strict=True):
        parameters.append((f"const {_TYPES[dtype]}*", buffer))
        parameters += [("const int*", f"{buffer}_shape")] if shape else []
    parameters += [(f"{_TYPES[dtype]}*", buffer) for buffer, dtype in outputs]
    constants = "".join(
        f"  using {key} = {_TYPES[value]};\n"
        if isinstance(value, mx.Dtype)
        else f"  constexpr {'bool' if isinstance(value, bool) else 'int'} {key} = {_word(value)};\n"
        for key, value in template
    )
    signature = ", ".join(f"{type_} {parameter}" for type_, parameter in parameters)
    text = f'{header}\nextern "C" __global__ void {name}({signature}) {{\n{constants}{source}}}\n'
    return CudaText(name, text, tuple(type_ for type_, _ in parameters), shapes)


@cache
def _compiled(text: CudaText, folder: Path) -> ctypes.CDLL:
    """The kernel for this machine."""
    compiler = find_compiler()
    for header in HEADERS:
        (folder / header).parent.mkdir(parents=True, exist_ok=True)
        (folder / header).write_text("#include <cuda_host.h>\n")
    conversions = folder / "conversions.o"  # which the compiler calls on processors without bfloat instructions
    if not conversions.exists():
        subprocess.run([*compiler.compile, *_FLAGS, "-c", RUNTIME / "conversions.cpp", "-o", conversions], check=True)
    number = len(list(folder.glob("*.cpp")))
    source, made, library = (folder / f"{text.name}_{number}{end}" for end in (".cpp", ".o", ".so"))
    source.write_text(text.text + text.called)
    paths = [f"-I{folder}", f"-I{HERE}", f"-I{RUNTIME}"]
    subprocess.run([*compiler.compile, *_FLAGS, *paths, "-c", source, "-o", made], check=True)
    subprocess.run([*compiler.link, "-o", library, made, conversions], check=True)
    return ctypes.CDLL(str(library))


@dataclass
class CudaOnHost:
    """`mx.fast.cuda_kernel`, and what was launched through it. Without `run` outputs are zeros."""

    folder: Path
    run: bool = True
    texts: list[CudaText] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def __call__(
        self, *, name: str, input_names: list[str], output_names: list[str], source: str, header: str, **_: Any
    ) -> Callable[..., list[mx.array]]:
        """A kernel, called as MLX's are."""

        def launch(
            *,
            inputs: Sequence[mx.array],
            template: Sequence[tuple[str, Any]],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: Sequence[Sequence[int]],
            output_dtypes: Sequence[mx.Dtype],
            **_: Any,
        ) -> list[mx.array]:
            given = [(name, array.dtype) for name, array in zip(input_names, inputs, strict=True)]
            made = list(zip(output_names, output_dtypes, strict=True))
            text = cuda_text(name, header, source, given, made, template)
            self.texts.append(text)
            self.threads.append(threadgroup[0] * threadgroup[1] * threadgroup[2])
            if not self.run:
                return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
            blocks = tuple(-(-n // each) for n, each in zip(grid, threadgroup, strict=True))
            outputs = list(zip(output_shapes, output_dtypes, strict=True))
            return _run(_compiled(text, self.folder), text, inputs, outputs, blocks, self.threads[-1])

        return launch


def _bytes(array: mx.array) -> np.ndarray:
    """The memory of an array, which has no holes."""
    return np.array(mx.contiguous(array).view(mx.uint8))


def _run(
    library: ctypes.CDLL,
    text: CudaText,
    inputs: Sequence[mx.array],
    outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
    blocks: Sequence[int],
    threads: int,
) -> list[mx.array]:
    """The outputs of a launch; what it does not write is NaN."""
    held: list[np.ndarray] = []
    for array, shape in zip(inputs, text.shapes, strict=True):
        held.append(_bytes(array))
        held += [np.array(array.shape, np.int32)] if shape else []
    results = [np.full(int(np.prod(shape)) * dtype.size, 0xFF, np.uint8) for shape, dtype in outputs]
    pointers = (ctypes.c_void_p * (len(held) + len(results)))(*(a.ctypes.data for a in [*held, *results]))
    if library.launch(library.call, pointers, (ctypes.c_uint * 3)(*blocks), ctypes.c_uint(threads)):
        raise AssertionError(f"{text.name}: threads of a block wait for others that never come")
    return [
        mx.array(result).view(dtype).reshape(shape) for result, (shape, dtype) in zip(results, outputs, strict=True)
    ]
