"""The same kernel bodies as CUDA: they compile where there is a CUDA compiler, without spilling a register."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cortexmlx.metal.cuda import cuda_body, cuda_file
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.shape import Kernel
from cortexmlx.metal.vector import VectorGeometry

NVCC = shutil.which("nvcc")
REGISTERS = 128


def test_threadgroup_memory_becomes_shared_memory() -> None:
    body = cuda_body(VectorGeometry.entry)
    assert "__shared__ float outputs[SIMDGROUPS * VALUE_DIM];" in body
    assert not re.search(r"\b(threadgroup|device|constant)\b", body)


@pytest.mark.skipif(NVCC is None, reason="no CUDA compiler")
@pytest.mark.parametrize(
    "v",
    [
        Variant("float16", "float16", 128, 128, 32, 8, softcap=True, sinks=True, forced=Kernel.VECTOR),
        *(
            pytest.param(Variant(t, t, d, d, 32, g, forced=Kernel.VECTOR), marks=pytest.mark.slow)
            for t in ("float16", "bfloat16", "float32")
            for d in (64, 80, 96, 112, 128, 192, 256)
            for g in (4, 8, 16)
        ),
    ],
    ids=lambda v: v.label,
)
def test_it_compiles_and_fits_the_registers(v: Variant, tmp_path: Path) -> None:
    source = tmp_path / "kernels.cu"
    source.write_text(cuda_file(v))
    command = [str(NVCC), "-std=c++17", "-arch=sm_80", "-maxrregcount", str(REGISTERS), "-cubin", "-Xptxas", "-v"]
    done = subprocess.run([*command, "-o", str(tmp_path / "out"), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\d+) bytes spill stores", done.stderr) == ["0", "0"], done.stderr
