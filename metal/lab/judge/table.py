"""Every judged kernel, by family; and the kernels of MLX that are not judged, each with the reason."""

import re
from collections.abc import Callable, Iterator

from cortexmlx.metal.lab.judge import attention, mlx_lm_kernels, quantized, rows
from cortexmlx.metal.lab.judge.cases import KernelCase, Skipped
from cortexmlx.metal.lab.legal.msl import KERNEL_FOLDER
from cortexmlx.metal.lab.sim.toolchain import mlx_headers

_KERNEL = re.compile(r"\bkernel\b[^;{}#]*?\bvoid\s+(\w+)\s*\(")

_NOTHING_IN_COMMON = "no case is kept: our kernels do nothing of the kind"

REASONS = {
    r".*nax.*": "needs the matrix units of Metal 4 (MetalPerformancePrimitives), which the simulator does not have",
    r"fft\.h": "no case has been written: the host plans radices and passes twiddles for it",
    r"fp_quantized\.h": "no case has been written: the block formats mxfp4, mxfp8 and nvfp4",
    r"gated_delta_update(_vjp)?\.h": "no case has been written; mlx-lm's kernels of the same recurrence are judged",
    r"steel/(gemm|conv)/.*": "no case has been written; steel_attention, which is built of the same tiles, is judged",
    r"indexing/.*": "no case has been written: gathers and scatters, of which the host writes the kernel functions",
    r"(arange|binary|binary_two|copy|ternary|unary)\.h": _NOTHING_IN_COMMON,
    r"(cross_entropy|dot|hadamard|scan|searchsorted|sort)\.h": _NOTHING_IN_COMMON,
    r"(gemv|gemv_masked|reduce|reduction/.*)\.h": _NOTHING_IN_COMMON,
}
"""Why the kernels of a file of the wheel are not judged. The patterns match the whole path."""

WITHOUT_CASE = {
    "affine_qvm_split_k": "no case has been written",
    "affine_qmm_t_splitk": "no case has been written",
    "affine_gather_qmv_fast": "no case has been written",
    "affine_gather_qmv": "no case has been written",
    "affine_gather_qvm": "no case has been written",
    "affine_gather_qmm_t": "no case has been written",
    "affine_gather_qmm_n": "no case has been written",
    "affine_gather_qmm_rhs": "no case has been written",
}
"""Why a kernel is not judged although others of its file are."""

NOT_IN_THE_WHEEL = ("arg_reduce", "conv", "fence", "layer_norm", "random", "rms_norm", "rope")
"""MLX's .metal files. A wheel has only what Apple's compiler made of them."""


def kernels_of_the_wheel() -> dict[str, str]:
    """Return every kernel function of the installed headers, with its file."""
    folder = mlx_headers() / KERNEL_FOLDER
    return {
        kernel: path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*.h"))
        for kernel in _KERNEL.findall(path.read_text())
    }


def unjudged_kernels() -> Iterator[Skipped]:
    """Yield one Skipped per kernel."""
    for kernel, file in kernels_of_the_wheel().items():
        reasons = [reason for pattern, reason in REASONS.items() if re.fullmatch(pattern, file)]
        if reasons or kernel in WITHOUT_CASE:
            yield Skipped("MLX", kernel, (reasons or [WITHOUT_CASE[kernel]])[0])
    for name in NOT_IN_THE_WHEEL:
        yield Skipped("MLX", f"{name}.metal", "the wheel brings headers only")
    for module in mlx_lm_kernels.WITHOUT_CASE:
        yield Skipped("mlx-lm", module, _NOTHING_IN_COMMON)


Cases = Callable[[], Iterator[KernelCase | Skipped] | Iterator[KernelCase] | Iterator[Skipped]]

FAMILIES: dict[str, Cases] = {
    "sdpa": attention.sdpa_cases,
    "attention": attention.grouped_cases,
    "steel": attention.steel_cases,
    "softmax": rows.softmax_cases,
    "quantized": quantized.cases,
    "mlx-lm": mlx_lm_kernels.cases,
    "others": unjudged_kernels,
}


def all_cases() -> list[KernelCase | Skipped]:
    """Return every judged kernel, in the order of the families."""
    return [case for cases in FAMILIES.values() for case in cases()]
