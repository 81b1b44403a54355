"""The same kernel bodies as CUDA. No NVIDIA GPU runs them here: the text runs on the CPU, lane by lane, against float64
(tests/lab/cuda/test_dialect.py), and where there is a CUDA compiler it compiles.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention.selfcheck_problems import make_decode_problem
from cortexmlx.matmul.selfcheck import MatmulProblem, make_problem
from cortexmlx.metal.kernels import DecodeKernels, kernel_text
from cortexmlx.metal.lab.cuda import cuda_factory
from cortexmlx.metal.lab.sim.toolchain import RUNTIME, find_compiler
from cortexmlx.metal.matmul.kernel import MatmulKernel
from cortexmlx.metal.matmul.shape import MATMULS, MatmulShape, MatmulVariant
from cortexmlx.metal.prefill import PREFILL_VARIANTS, PrefillKernel, PrefillVariant
from cortexmlx.metal.rules import VARIANTS, Variant
from cortexmlx.metal.shape import Kernel
from support.kernels import prefill_problem
from support.kernels.paged_problem import (
    TOLERANCE,
    Options,
    answer,
    answers,
    attend,
    error,
    random_rows,
    several_queries,
)
from support.kernels.quantized_problem import attend_quantized, quantized_rows
from support.kernels.quantized_problem import variant as quantized_variant

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


NVCC = shutil.which("nvcc")
BLOCK_REGISTERS = 65536
"""Registers of a thread block at most, on every NVIDIA GPU since 2012."""

VECTOR = Variant("float16", "float16", 128, 128, 32, 3, forced_kernel=Kernel.VECTOR)
MATRIX = Variant("bfloat16", "float32", 72, 80, 16, 4, query_tokens=3, forced_kernel=Kernel.MATRIX)
WIDE = Variant("float16", "bfloat16", 96, 32, 16, 4, query_tokens=3, latent=True)
LEFT, RIGHT = np.float32(np.random.default_rng(0).standard_normal((2, 8, 8)))


@contextmanager
def cuda_on_host(folder: Path, run: bool = True) -> Iterator[CudaOnHost]:
    """MLX as if it had CUDA."""
    host = CudaOnHost(folder, run)
    with patch.object(mx.fast, "cuda_kernel", host):
        yield host


def test_nothing_of_metals_address_spaces_is_left(tmp_path: Path) -> None:
    with cuda_on_host(tmp_path, run=False) as host:
        for v in (VECTOR, MATRIX, WIDE):
            attend(DecodeKernels(cuda_factory), v, random_rows(v, [5]), queries=_queries(v, 1))
    assert len(host.texts) == 6
    for made in host.texts:
        code = re.sub(r"//.*", "", made.text)
        assert not re.search(r"\b(threadgroup|device|constant|thread)\b|<metal_", code)
        assert re.search(r"__shared__ __align__\(16\) float (outputs|shared_scores)\[", code)


def _queries(v: Variant, rows: int) -> np.ndarray:
    return np.zeros((rows, 2 * v.group, v.query_tokens, v.key_dim), np.float32)


def test_a_product_of_matrices_is_that_of_float64(tmp_path: Path) -> None:
    """A half by a float, added to a float."""
    place = kernel_text("paged_matrix.metal")
    body = """
      const MatrixPlace at = matrix_place(thread_index_in_simdgroup);
      const int first = at.row * 8 + at.column;
      simdgroup_matrix<T, 8, 8> a;
      simdgroup_matrix<float, 8, 8> b;
      for (int e = 0; e < 2; e++) {
        a.thread_elements()[e] = left[first + e];
        b.thread_elements()[e] = right[first + e];
      }
      simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(2.0f);
      simdgroup_multiply_accumulate(sum, a, b, sum);
      for (int e = 0; e < 2; e++) {
        product[first + e] = sum.thread_elements()[e] + float(simdgroup_index_in_threadgroup);
      }
    """
    one = (32, 1, 1)
    with cuda_on_host(tmp_path):
        kernel: Any = cuda_factory(
            name="product", input_names=["left", "right"], output_names=["product"], source=body, header=place
        )
        (got,) = kernel(
            inputs=[mx.array(LEFT).astype(mx.float16), mx.array(RIGHT)],
            template=[("T", mx.float16)],
            grid=one,
            threadgroup=one,
            output_shapes=[(8, 8)],
            output_dtypes=[mx.float32],
        )
    wanted = LEFT.astype(np.float16).astype(np.float64) @ RIGHT.astype(np.float64) + 2
    assert error(np.array(got), wanted) < 2e-6


@pytest.mark.parametrize(
    "v",
    [
        VECTOR,
        MATRIX,
        WIDE,
        *(
            pytest.param(Variant(t, t, d, d, 32, g, forced_kernel=k), marks=pytest.mark.slow)
            for t, d, g in (("float16", 64, 8), ("bfloat16", 128, 5), ("float32", 192, 4), ("float16", 256, 12))
            for k in (Kernel.VECTOR, Kernel.MATRIX)
        ),
        pytest.param(Variant("float32", "float16", 512, 512, 32, 3), marks=pytest.mark.slow),
        pytest.param(Variant("bfloat16", "bfloat16", 576, 512, 32, 9, latent=True), marks=pytest.mark.slow),
    ],
    ids=lambda v: v.label,
)
def test_the_text_gives_attention_on_a_cpu(v: Variant, tmp_path: Path) -> None:
    rows, queries = several_queries(v, [9, 300])
    options = Options(window=270, softcap=4.0, sinks=np.linspace(-1, 2, 2 * v.group))
    with cuda_on_host(tmp_path) as host:
        got = attend(DecodeKernels(cuda_factory), v, rows, options, queries=queries, tail_tokens=5)
    assert [text.name for text in host.texts] == [f"cortex_{v.geometry.name}", "cortex_paged_reduce"]
    assert error(got, answers(v, rows, queries, options)) < TOLERANCE[v.dtype]


@pytest.mark.parametrize(
    "v",
    [
        quantized_variant(dtype="float16", kv_dtype="float16", bits=4),
        pytest.param(quantized_variant(group=3, dim=64), marks=pytest.mark.slow),
        pytest.param(quantized_variant(dim=128, quant_group=64, kv_dtype="bfloat16"), marks=pytest.mark.slow),
        pytest.param(quantized_variant(group=8, dim=128, bits=4, dtype="bfloat16"), marks=pytest.mark.slow),
    ],
    ids=lambda v: v.label,
)
def test_the_text_of_quantized_keys_and_values_gives_attention_on_a_cpu(v: Variant, tmp_path: Path) -> None:
    rows, options = quantized_rows(v, [9, 300]), Options(window=270)
    with cuda_on_host(tmp_path) as host:
        got = attend_quantized(DecodeKernels(cuda_factory), v, rows, options, tail_tokens=5)
    assert "quantized" in host.texts[0].name
    assert error(got, answer(v, rows, options)) < TOLERANCE[v.dtype]


@pytest.mark.parametrize(
    "v",
    [
        prefill_problem.variant(dim=24, dtype="float16"),
        pytest.param(PrefillVariant("bfloat16", "float32", 72, 80, 16, 4), marks=pytest.mark.slow),
        pytest.param(PrefillVariant("float16", "float16", 256, 128, 32, 1), marks=pytest.mark.slow),
    ],
    ids=lambda v: v.label,
)
def test_the_text_of_prefill_gives_attention_on_a_cpu(v: PrefillVariant, tmp_path: Path) -> None:
    prompts = prefill_problem.random_prompts(v, [100, 200])
    stretches = [prefill_problem.Stretch(0, 0, 100), prefill_problem.Stretch(1, 130, 170)]
    options = Options(window=60, softcap=4.0, sinks=np.linspace(-1, 2, 2 * v.group))
    with cuda_on_host(tmp_path):
        got = prefill_problem.attend(PrefillKernel(cuda_factory), v, prompts, stretches, options)
    assert error(got, prefill_problem.answers(v, prompts, stretches, options)) < TOLERANCE[v.dtype]


def multiplied(problem: MatmulProblem) -> mx.array:
    """The product of a problem, by CUDA's text."""
    kernel = MatmulKernel(cuda_factory)
    if problem.experts is None:
        return kernel(problem.shape, problem.rows, problem.weights)
    return kernel.multiply_experts(problem.shape, problem.rows, problem.weights, problem.experts)


@pytest.mark.parametrize(
    "product",
    [
        MatmulVariant(MatmulShape("float32", "mxfp4", 4, 32, 64, 64, experts=8), 24),
        *(pytest.param(product, marks=pytest.mark.slow) for product in MATMULS),
    ],
    ids=lambda product: product.label,
)
def test_the_text_of_products_gives_them_on_a_cpu(product: MatmulVariant, tmp_path: Path) -> None:
    problem = make_problem(product.shape, product.rows)
    with cuda_on_host(tmp_path):
        got = multiplied(problem)
    assert error(np.array(got.astype(mx.float32)), problem.expected) < TOLERANCE[product.shape.dtype]


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="no CUDA compiler")
@pytest.mark.parametrize("v", [MATRIX, VECTOR, WIDE, *VARIANTS, *PREFILL_VARIANTS, *MATMULS], ids=lambda v: v.label)
def test_it_compiles_with_its_registers(v: Variant | PrefillVariant | MatmulVariant, tmp_path: Path) -> None:
    """As many registers as a block of the kernel's threads may have, or it would not start. What is spilled depends on
    the compiler.
    """
    with cuda_on_host(tmp_path, run=False) as host:
        if isinstance(v, MatmulVariant):
            multiplied(make_problem(v.shape, v.rows))
        elif isinstance(v, PrefillVariant):
            given = prefill_problem.random_prompts(v, [5]), [prefill_problem.Stretch(0, 0, 5)]
            PrefillKernel(cuda_factory)(*prefill_problem.problem(v, *given))
        else:
            given = make_decode_problem(v, None)
            DecodeKernels(cuda_factory)(v, given.items, given.inputs)
    for made, threads in zip(host.texts, host.threads, strict=True):
        source = tmp_path / f"{made.name}.cu"
        source.write_text(made.text)
        registers = str(min(255, BLOCK_REGISTERS // threads))
        command = [str(NVCC), "-std=c++17", "-arch=sm_80", "-maxrregcount", registers, "-cubin"]
        done = subprocess.run([*command, "-o", str(tmp_path / "out"), source], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
