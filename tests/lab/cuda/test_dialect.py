"""The same kernel bodies as CUDA. No NVIDIA GPU runs them here: the text runs on the CPU, lane by lane, against float64
(tests/support/kernels/cuda_host.py), and where there is a CUDA compiler it compiles.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.attention.selfcheck_problems import make_decode_problem
from cortexmlx.metal.kernels import DecodeKernels, kernel_text
from cortexmlx.metal.lab.cuda import cuda_factory
from cortexmlx.metal.prefill import PREFILL_VARIANTS, PrefillKernel, PrefillVariant
from cortexmlx.metal.products.kernel import ProductKernel
from cortexmlx.metal.products.shape import PRODUCTS, ProductShape, ProductVariant
from cortexmlx.metal.rules import VARIANTS, Variant
from cortexmlx.metal.shape import Kernel
from cortexmlx.products.selfcheck import ProductProblem
from cortexmlx.products.selfcheck import make_problem as make_product
from support.kernels import prefill_problem
from support.kernels.cuda_host import CudaOnHost
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


def multiplied(problem: ProductProblem) -> mx.array:
    """The product of a problem, by CUDA's text."""
    kernel = ProductKernel(cuda_factory)
    if problem.experts is None:
        return kernel(problem.shape, problem.rows, problem.weights)
    return kernel.multiply_experts(problem.shape, problem.rows, problem.weights, problem.experts)


@pytest.mark.parametrize(
    "product",
    [
        ProductVariant(ProductShape("float32", "mxfp4", 4, 32, 64, 64, experts=8), 24),
        *(pytest.param(product, marks=pytest.mark.slow) for product in PRODUCTS),
    ],
    ids=lambda product: product.label,
)
def test_the_text_of_products_gives_them_on_a_cpu(product: ProductVariant, tmp_path: Path) -> None:
    problem = make_product(product.shape, product.rows)
    with cuda_on_host(tmp_path):
        got = multiplied(problem)
    assert error(np.array(got.astype(mx.float32)), problem.expected) < TOLERANCE[product.shape.dtype]


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="no CUDA compiler")
@pytest.mark.parametrize("v", [MATRIX, VECTOR, WIDE, *VARIANTS, *PREFILL_VARIANTS, *PRODUCTS], ids=lambda v: v.label)
def test_it_compiles_with_its_registers(v: Variant | PrefillVariant | ProductVariant, tmp_path: Path) -> None:
    """As many registers as a block of the kernel's threads may have, or it would not start. What is spilled depends on
    the compiler.
    """
    with cuda_on_host(tmp_path, run=False) as host:
        if isinstance(v, ProductVariant):
            multiplied(make_product(v.shape, v.rows))
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
