"""The checks of `cortexmlx doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cortexmlx import __version__
from cortexmlx.cli.doctor.choices import saved_choices
from cortexmlx.cli.doctor.report import CheckStatus, DoctorCheck
from cortexmlx.cli.terminal import console
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.system.machine import (
    has_matrix_units,
    memory_bytes,
    mlx_has_matrix_kernels,
    trusts_gpu,
    working_set_bytes,
)

if TYPE_CHECKING:
    from cortexmlx.attention.selfcheck import VariantCheck
    from cortexmlx.metal.checked import CheckedKernel
    from cortexmlx.metal.kernels import KernelFactory


OnKernel = Callable[[int, int], None]
"""Called before each kernel is checked, and after the last: with the number of those checked, and of all."""


def run_checks(*, quick: bool = False, on_kernel: OnKernel = lambda done, count: None) -> Iterator[DoctorCheck]:
    """Run every check and yield its lines in order. A check that raises counts as failed, and the next still runs. If
    `quick`, one variant of every kernel and dtype is checked.
    """
    for name, look in CHECKS.items():
        try:
            yield from check_attention(quick, on_kernel) if look is check_attention else look()
        except Exception as error:
            yield DoctorCheck(
                name, CheckStatus.FAIL, f"{type(error).__name__}: {error}", "run it with --debug, and report it"
            )


def _check_version() -> Iterator[DoctorCheck]:
    """Report the versions of cortexmlx and Python."""
    yield DoctorCheck("cortexmlx", CheckStatus.OK, f"{__version__}, Python {platform.python_version()}")


def _check_machine() -> Iterator[DoctorCheck]:
    """Check the system, the processor and the memory."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        yield DoctorCheck("machine", CheckStatus.FAIL, system, "MLX needs Apple Silicon and a native (arm64) Python")
        return
    memory = f"{format_bytes(memory_bytes())} memory, {format_bytes(working_set_bytes())} of it for models"
    yield DoctorCheck("machine", CheckStatus.OK, f"{system}, {memory}")


def _check_packages() -> Iterator[DoctorCheck]:
    """Check that the required versions of MLX and mlx-lm are installed."""
    from packaging.requirements import Requirement

    listed = map(Requirement, importlib.metadata.requires("cortexmlx") or [])
    requirements = {r.name: r for r in listed if r.marker is None or r.marker.evaluate({"extra": ""})}
    for name in ("mlx", "mlx-lm"):
        requirement = requirements[name]
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield DoctorCheck(
                name, CheckStatus.FAIL, "not installed", f"pip install '{requirement.name}{requirement.specifier}'"
            )
            continue
        if requirement.specifier.contains(version):
            yield DoctorCheck(name, CheckStatus.OK, version)
        else:
            detail = f"{version}, but this version was made for {requirement.specifier}"
            yield DoctorCheck(
                name, CheckStatus.FAIL, detail, f"pip install '{requirement.name}{requirement.specifier}'"
            )


def _check_device() -> Iterator[DoctorCheck]:
    """Check which device MLX uses."""
    from cortexmlx.cpu import blas

    blas.preload()
    import mlx.core as mx

    from cortexmlx.bench.measure.machine import BenchMachine

    machine = BenchMachine.detect()
    verdict, advice, unknown = CheckStatus.OK, "", ""
    if mx.metal.is_available() and machine.device == "CPU":
        verdict, advice = (
            CheckStatus.FAIL,
            "MLX computes on a GPU, but none can be opened in this session or virtual machine",
        )
    elif sys.platform == "darwin" and machine.device == "CPU":
        verdict, advice = (
            CheckStatus.WARN,
            f"this MLX was built without Metal: pip install --force-reinstall --no-cache mlx=={machine.mlx}",
        )
    elif "Paravirtual" in machine.chip:
        verdict, advice = CheckStatus.WARN, "the GPU of a virtual machine: its results and times are not an Apple GPU's"
    elif has_matrix_units() and mlx_has_matrix_kernels() is None:
        unknown = "; cannot tell whether this build of MLX has NAX kernels for the GPU's matrix units"
    elif has_matrix_units() and not mlx_has_matrix_kernels():
        verdict, advice = (
            CheckStatus.WARN,
            "this build of MLX has no NAX kernels for the GPU's matrix units, so prompts are up to 3 times slower: "
            f"pip install --force-reinstall mlx=={machine.mlx} mlx-metal=={machine.mlx}, with a Python that was built "
            "for macOS 26",
        )
    yield DoctorCheck("device", verdict, f"{machine.device}: {machine.chip}, {machine.cpus} CPUs{unknown}", advice)


def _check_blas() -> Iterator[DoctorCheck]:
    """Check which BLAS computes matmuls on the CPU."""
    from cortexmlx.cpu import blas

    status = blas.preload()
    advice = {
        blas.BlasState.SLOW: "do what the line says; everything works without, slowly",
        blas.BlasState.TOO_LATE: "do what the line says; everything works without, slowly",
        blas.BlasState.SWITCHED_OFF: f"unset {blas.SWITCH} for speed",
    }
    verdict = CheckStatus.WARN if status.state in advice else CheckStatus.OK
    yield DoctorCheck("BLAS", verdict, status.line, advice.get(status.state, ""))


def _check_weight_dtype() -> Iterator[DoctorCheck]:
    """Check whether weights run as stored or are widened to float32 for a CPU."""
    import mlx.core as mx

    from cortexmlx.models.load import DEQUANTIZE_SWITCH

    if sys.platform != "linux" or mx.default_device() != mx.cpu:
        yield DoctorCheck("weights", CheckStatus.OK, "run as they are stored")
    elif os.environ.get(DEQUANTIZE_SWITCH) == "0":
        detail = f"quantized weights stay so, which is slow on a CPU ({DEQUANTIZE_SWITCH}=0)"
        yield DoctorCheck("weights", CheckStatus.WARN, detail, f"unset {DEQUANTIZE_SWITCH} for speed")
    else:
        limit = format_bytes(memory_bytes() // 4)
        detail = f"made float32, for speed on a CPU, up to {limit} ({DEQUANTIZE_SWITCH}=0 switches it off)"
        yield DoctorCheck("weights", CheckStatus.OK, detail)


def _check_starter_model() -> Iterator[DoctorCheck]:
    """Check whether the starter model is installed."""
    from cortexmlx.models.resolve import STARTER, STARTER_INSTALL, starter_path

    path = starter_path()
    if path is None:
        yield DoctorCheck("starter model", CheckStatus.WARN, f"{STARTER} is not installed", STARTER_INSTALL)
    else:
        yield DoctorCheck("starter model", CheckStatus.OK, f"{STARTER}, {format_bytes(path.stat().st_size)}")


def _check_hub_cache() -> Iterator[DoctorCheck]:
    """Check what the hub's cache holds, and whether the disk has room for more."""
    from huggingface_hub import constants

    from cortexmlx.models.inventory import list_models
    from cortexmlx.models.resolve import SourceKind

    cache = Path(constants.HF_HUB_CACHE)
    models = [model for model in list_models() if model.kind is SourceKind.HUB]
    size, existing_folder = sum(model.size for model in models), next(p for p in (cache, *cache.parents) if p.exists())
    free = shutil.disk_usage(existing_folder).free
    detail = f"{len(models)} of the hub, {format_bytes(size)}; {format_bytes(free)} free in {cache}"
    if not os.access(existing_folder, os.W_OK):
        yield DoctorCheck(
            "models", CheckStatus.WARN, detail, f"nothing can be downloaded: you may not write in {existing_folder}"
        )
    elif free < _MIN_FREE_BYTES:
        yield DoctorCheck(
            "models", CheckStatus.WARN, detail, "many models need more: free some, or set HF_HOME to a larger disk"
        )
    else:
        yield DoctorCheck("models", CheckStatus.OK, detail)


_MIN_FREE_BYTES = 5 << 30
"""Bytes of a model of 8 billion parameters in 4 bits."""


def _check_terminal() -> Iterator[DoctorCheck]:
    """Check what a chat in this terminal can show."""
    if not sys.stdout.isatty():
        yield DoctorCheck("terminal", CheckStatus.OK, "none: plain text is written")
        return
    size, encoding = shutil.get_terminal_size(), sys.stdout.encoding.lower()
    shows = "colours" if console.is_coloured(sys.stdout) else "no colours"
    detail = f"{size.columns}x{size.lines}, {shows}, {encoding}"
    if encoding.replace("-", "") != "utf8":
        yield DoctorCheck(
            "terminal", CheckStatus.WARN, detail, "characters that it lacks print as ?: set LANG to a UTF-8 locale"
        )
    elif not console.is_terminal(sys.stdout):
        yield DoctorCheck("terminal", CheckStatus.WARN, detail, "TERM=dumb: chats are plain text")
    else:
        yield DoctorCheck("terminal", CheckStatus.OK, detail)


def check_attention(quick: bool, on_kernel: OnKernel) -> Iterator[DoctorCheck]:
    """Check which attention backend runs, and that all our kernels compute right. A wrong kernel is
    a failure on a trusted GPU, which nobody should miss, and else a warning, since something slower takes its place.
    """
    import mlx.core as mx

    from cortexmlx.attention.backends import choose_backend

    name = choose_backend("auto").name
    if name != "metal":
        yield DoctorCheck("attention", CheckStatus.OK, f"{name} (the kernels need an Apple GPU)")
        return
    from cortexmlx.metal import checked
    from cortexmlx.metal.matmul.shape import MatmulVariant

    variants, trusted = checked.select_quick() if quick else checked.CHECKED, trusts_gpu()
    yield DoctorCheck("attention", CheckStatus.OK, f"{name}, {len(variants)} of {len(checked.CHECKED)} kernels checked")
    on_kernel(0, len(variants))
    for number, check in enumerate(check_kernels(cast("KernelFactory", mx.fast.metal_kernel), variants), start=1):
        instead = "MLX's kernel serves instead" if isinstance(check.variant, MatmulVariant) else _SLOWER
        verdict, advice = (CheckStatus.OK, "") if check.agrees else (CheckStatus.WARN, f"{instead}: {_REPORT}")
        if not check.agrees and not check.refused and trusted:
            verdict = CheckStatus.FAIL
        yield DoctorCheck("kernel", verdict, f"{check.variant.label}: {check.outcome}", advice, check.message)
        on_kernel(number, len(variants))


def check_kernels(factory: KernelFactory, variants: Sequence[CheckedKernel]) -> Iterator[VariantCheck]:
    """Check the kernels that `factory` makes against float64, one variant after the other."""
    from cortexmlx.attention.selfcheck import check_decode, check_prefill, check_tail_write
    from cortexmlx.matmul.selfcheck import check_matmul
    from cortexmlx.metal.kernels import DecodeKernels
    from cortexmlx.metal.matmul.kernel import MatmulKernel
    from cortexmlx.metal.matmul.shape import MatmulVariant
    from cortexmlx.metal.prefill import PrefillKernel, PrefillVariant
    from cortexmlx.metal.tail_write import TailWriteKernel, TailWriteVariant

    decode, prefill, matmul = DecodeKernels(factory), PrefillKernel(factory), MatmulKernel(factory)
    tail_write = TailWriteKernel(factory)
    for variant in variants:
        if isinstance(variant, PrefillVariant):
            yield check_prefill(prefill, variant)
        elif isinstance(variant, TailWriteVariant):
            yield check_tail_write(tail_write, variant)
        elif isinstance(variant, MatmulVariant):
            yield check_matmul(matmul, variant.shape, variant.rows)
        else:
            yield check_decode(decode, variant)


def _check_simulator() -> Iterator[DoctorCheck]:
    """Check whether the tools for developers of kernels are installed. Nothing that a user runs needs them."""
    from cortexmlx.system.developer_parts import HOW_TO_GET_THEM, has_developer_parts

    if has_developer_parts():
        yield DoctorCheck("simulator", CheckStatus.OK, "installed, with the other parts for developers")
    else:
        detail = f"not in this install, nor needed to run models; to work on the kernels, {HOW_TO_GET_THEM}"
        yield DoctorCheck("simulator", CheckStatus.OK, detail)


_SLOWER = "this shape runs on the reference path, slower"
_REPORT = "please report what `cortexmlx doctor --json` says of it"

CHECKS: dict[str, Callable[..., Iterator[DoctorCheck]]] = {
    "cortexmlx": _check_version,
    "machine": _check_machine,
    "packages": _check_packages,
    "BLAS": _check_blas,
    "device": _check_device,
    "weights": _check_weight_dtype,
    "starter model": _check_starter_model,
    "models": _check_hub_cache,
    "terminal": _check_terminal,
    "attention": check_attention,
    "choice": saved_choices,
    "simulator": _check_simulator,
}
