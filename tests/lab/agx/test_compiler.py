"""Finding, building and running Mesa's compiler; what it makes of kernels whose instructions are known."""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cortexmlx.errors import ToolchainMissing
from cortexmlx.metal.lab.agx import compiler as agx
from cortexmlx.metal.lab.agx.__main__ import CompiledWork, read_result
from cortexmlx.metal.lab.agx.compiler import MesaCompiler, cache_folder, find_compiler
from cortexmlx.metal.lab.agx.kernels import our_kernels, prefill_kernel
from cortexmlx.metal.lab.agx.listing import find_loops, read_blocks
from cortexmlx.metal.lab.agx.opencl import Instance, opencl_unit
from cortexmlx.metal.prefill import PREFILL_VARIANTS
from cortexmlx.metal.rules import VARIANTS, Variant
from cortexmlx.metal.shape import DTYPES, Kernel
from cortexmlx.metal.vector import VectorGeometry

BUILT = find_compiler()
real = pytest.mark.skipif(
    BUILT is None, reason="Mesa's compiler is not built: python -m cortexmlx.metal.lab.agx --build"
)


def test_what_was_built_is_found_by_its_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORTEXMLX_AGX_CACHE", str(tmp_path))
    assert find_compiler() is None
    folder = cache_folder()
    assert folder.parent == tmp_path
    folder.mkdir()
    (folder / "versions").write_text("mesa=25.0.7-1\nllvm=19\nspirv=19.1\n")
    assert find_compiler() == MesaCompiler(folder, "25.0.7-1", 19)


def test_the_script_is_one_that_a_shell_can_read() -> None:
    script = Path(agx.__file__).parent / "build.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert not any(word in script.read_text() for word in ("http:", "https:"))


def test_a_program_that_is_not_there_is_no_fault_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainMissing, match="clang-19 is not there"):
        MesaCompiler(tmp_path, "25.0.7", 19).compile("")


def compiled(body: str) -> tuple[Counter[str], str]:
    """The instructions of the one loop of a kernel by class, and the listing."""
    assert BUILT is not None
    text = (
        "[[kernel]] void k(const device half* a [[buffer(0)]], device float* out [[buffer(1)]],\n"
        "  const constant int& n [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {\n"
        f"  float x = a[lane], y = a[lane + 32];\n  for (int i = 0; i < n; i++) {{ {body} }}\n"
        "  out[lane] = x + y;\n}\n"
    )
    output = BUILT.compile(opencl_unit(text, Instance("k", {}, (32, 1, 1))))
    (loop,) = find_loops(read_blocks(output.listing))
    return loop.kinds, output.listing


@real
@pytest.mark.slow
def test_instructions_that_were_written_are_counted() -> None:
    kinds, _ = compiled("x = x * y + 1.5f; y = y * x + 2.5f; x = simd_sum(x); y = fast::exp(y);")
    assert (kinds["fma"], kinds["reduce"]) == (2, 1)
    assert kinds["float"] == 2, "a factor and the power of 2"
    kinds, _ = compiled("x = simd_shuffle_xor(x, 1) + simd_shuffle_xor(y, 8);")
    assert kinds["shuffle"] == 2
    kinds, _ = compiled("x = simd_shuffle(x, ushort(i));")
    assert kinds["shuffle"] == 4, "a run-time lane costs a shuffle for each of four lanes that share an index"


@real
@pytest.mark.slow
def test_a_matrix_product_is_one_instruction_on_pairs_of_registers() -> None:
    kinds, listing = compiled(
        "simdgroup_matrix<float, 8, 8> m(x); simdgroup_matrix<half, 8, 8> f; simdgroup_load(f, a + i * 64);"
        "simdgroup_multiply_accumulate(m, f, f, m); x += m.thread_elements().x; y += m.thread_elements().y;"
    )
    assert kinds["matrix"] == 1 and kinds["device load"] == 1
    assert "simd_matrix" in listing


@real
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_decode_kernel_spills_and_a_core_holds_384_threads(dtype: str) -> None:
    shapes = [Variant(dtype, dtype, dim, dim, 32, group) for dim in (64, 96, 128, 192, 256) for group in (1, 2, 8)]
    chosen = [*(v for v in VARIANTS if v.dtype == dtype), *shapes]
    vector = [replace(v, forced_kernel=Kernel.VECTOR) for v in chosen if VectorGeometry.refusal(v) is None]
    for variant in {*chosen, *vector}:
        statistics = decode(variant).statistics
        assert (statistics.spills, statistics.fills) == (0, 0), variant.label
        assert statistics.resident_threads >= 384 and statistics.resident_threads >= variant.geometry.threads


def decode(variant: Variant) -> CompiledWork:
    """A variant's decode kernel, compiled."""
    assert BUILT is not None
    workload = next(iter(our_kernels(variant)))
    return read_result(workload, BUILT.compile(workload.source))


@real
@pytest.mark.slow
def test_no_prefill_kernel_spills_and_a_core_holds_its_threadgroup() -> None:
    assert BUILT is not None
    for variant in PREFILL_VARIANTS:
        workload = prefill_kernel(variant)
        statistics = read_result(workload, BUILT.compile(workload.source)).statistics
        assert (statistics.spills, statistics.fills) == (0, 0), variant.label
        assert statistics.resident_threads >= max(384, 2 * variant.threads), variant.label
