"""The checks of `cortexmlx doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from cortexmlx import __version__
from cortexmlx.cli.doctor.check import Check, Verdict
from cortexmlx.cli.doctor.choices import kept_choices
from cortexmlx.cli.terminal import console
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.system.machine import memory_bytes, working_set_bytes


def all_checks() -> Iterator[Check]:
    """Yield every check in order. A check that raises counts as failed, and the next one still runs."""
    for name, look in CHECKS.items():
        try:
            yield from look()
        except Exception as error:
            yield Check(name, Verdict.FAIL, f"{type(error).__name__}: {error}", "run it with --debug, and report it")


def _version() -> Iterator[Check]:
    yield Check("cortexmlx", Verdict.OK, f"{__version__}, Python {platform.python_version()}")


def _machine() -> Iterator[Check]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        yield Check("machine", Verdict.FAIL, system, "MLX needs Apple Silicon and a native (arm64) Python")
        return
    memory = f"{format_bytes(memory_bytes())} memory, {format_bytes(working_set_bytes())} of it for models"
    yield Check("machine", Verdict.OK, f"{system}, {memory}")


def _packages() -> Iterator[Check]:
    from packaging.requirements import Requirement

    wanted = {r.name: r for r in map(Requirement, importlib.metadata.requires("cortexmlx") or []) if _applies(r.marker)}
    for name in ("mlx", "mlx-lm"):
        needed = wanted[name]
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, Verdict.FAIL, "not installed", f"pip install '{needed.name}{needed.specifier}'")
            continue
        if needed.specifier.contains(found):
            yield Check(name, Verdict.OK, found)
        else:
            detail = f"{found}, but this version was made for {needed.specifier}"
            yield Check(name, Verdict.FAIL, detail, f"pip install '{needed.name}{needed.specifier}'")


def _applies(marker: object) -> bool:
    return marker is None or bool(marker.evaluate({"extra": ""}))  # type: ignore[attr-defined]


def _device() -> Iterator[Check]:
    from cortexmlx.cpu import blas

    blas.preload()
    import mlx.core as mx

    from cortexmlx.bench.measure.machine import Machine

    here = Machine.here()
    verdict, advice = Verdict.OK, ""
    if mx.metal.is_available() and here.device == "CPU":
        verdict, advice = (
            Verdict.FAIL,
            "MLX computes on a GPU, but none can be opened in this session or virtual machine",
        )
    elif sys.platform == "darwin" and here.device == "CPU":
        verdict, advice = Verdict.WARN, "this MLX was built without Metal: pip install --force-reinstall --no-cache mlx"
    elif "Paravirtual" in here.chip:
        verdict, advice = Verdict.WARN, "the GPU of a virtual machine: its results and times are not an Apple GPU's"
    yield Check("device", verdict, f"{here.device}: {here.chip}, {here.cpus} CPUs", advice)


def _blas() -> Iterator[Check]:
    from cortexmlx.cpu import blas

    status = blas.preload()
    advice = {
        blas.BlasState.SLOW: "do what the line says; everything works without, slowly",
        blas.BlasState.TOO_LATE: "do what the line says; everything works without, slowly",
        blas.BlasState.SWITCHED_OFF: f"unset {blas.SWITCH} for speed",
    }
    verdict = Verdict.WARN if status.state in advice else Verdict.OK
    yield Check("BLAS", verdict, status.line, advice.get(status.state, ""))


def _float32() -> Iterator[Check]:
    import mlx.core as mx

    from cortexmlx.models.load import DEQUANTIZE_SWITCH

    if sys.platform != "linux" or mx.default_device() != mx.cpu:
        yield Check("weights", Verdict.OK, "run as they are stored")
    elif os.environ.get(DEQUANTIZE_SWITCH) == "0":
        detail = f"quantized weights stay so, which is slow on a CPU ({DEQUANTIZE_SWITCH}=0)"
        yield Check("weights", Verdict.WARN, detail, f"unset {DEQUANTIZE_SWITCH} for speed")
    else:
        limit = format_bytes(memory_bytes() // 4)
        detail = f"made float32, for speed on a CPU, up to {limit} ({DEQUANTIZE_SWITCH}=0 switches it off)"
        yield Check("weights", Verdict.OK, detail)


def _starter() -> Iterator[Check]:
    from cortexmlx.models.resolve import STARTER, STARTER_INSTALL, starter_path

    path = starter_path()
    if path is None:
        yield Check("starter model", Verdict.WARN, f"{STARTER} is not installed", STARTER_INSTALL)
    else:
        yield Check("starter model", Verdict.OK, f"{STARTER}, {format_bytes(path.stat().st_size)}")


def _models() -> Iterator[Check]:
    """Check what the hub's cache holds, and whether there is room for more."""
    from huggingface_hub import constants

    from cortexmlx.models.inventory import list_models
    from cortexmlx.models.resolve import SourceKind

    cache = Path(constants.HF_HUB_CACHE)
    here = [model for model in list_models() if model.kind is SourceKind.HUB]
    size, there = sum(model.size for model in here), next(p for p in (cache, *cache.parents) if p.exists())
    free = shutil.disk_usage(there).free
    detail = f"{len(here)} of the hub, {format_bytes(size)}; {format_bytes(free)} free in {cache}"
    if not os.access(there, os.W_OK):
        yield Check("models", Verdict.WARN, detail, f"nothing can be downloaded: you may not write in {there}")
    elif free < _LITTLE_ROOM:
        yield Check("models", Verdict.WARN, detail, "many models need more: free some, or set HF_HOME to a larger disk")
    else:
        yield Check("models", Verdict.OK, detail)


_LITTLE_ROOM = 5 << 30
"""Bytes of a model of 8 billion parameters in 4 bits."""


def _terminal() -> Iterator[Check]:
    """Check what a chat in this terminal can show."""
    if not sys.stdout.isatty():
        yield Check("terminal", Verdict.OK, "none: plain text is written")
        return
    size, encoding = shutil.get_terminal_size(), sys.stdout.encoding.lower()
    shows = "colours" if console.is_coloured(sys.stdout) else "no colours"
    detail = f"{size.columns}x{size.lines}, {shows}, {encoding}"
    if encoding.replace("-", "") != "utf8":
        yield Check("terminal", Verdict.WARN, detail, "characters that it lacks print as ?: set LANG to a UTF-8 locale")
    elif not console.is_terminal(sys.stdout):
        yield Check("terminal", Verdict.WARN, detail, "TERM=dumb: chats are plain text")
    else:
        yield Check("terminal", Verdict.OK, detail)


def _attention() -> Iterator[Check]:
    import mlx.core as mx

    from cortexmlx.attention.backends import choose_backend

    name = choose_backend("auto").name
    if name != "metal":
        yield Check("attention", Verdict.OK, f"{name} (the kernels need an Apple GPU)")
        return
    yield Check("attention", Verdict.OK, name)
    from cortexmlx.attention.selfcheck import check_all
    from cortexmlx.metal.kernels import KernelFactory

    for check in check_all(cast(KernelFactory, mx.fast.metal_kernel)):
        verdict, advice = (Verdict.OK, "") if check.agrees else (Verdict.WARN, _SLOWER)
        yield Check("kernel", verdict, f"{check.variant.label}: {check.outcome}", advice, check.message)


def _simulator() -> Iterator[Check]:
    """Check whether the developers' parts are installed. Nothing that a user runs needs them."""
    from cortexmlx.system.developer_parts import HOW_TO_GET_THEM, has_developer_parts

    if has_developer_parts():
        yield Check("simulator", Verdict.OK, "installed, with the other parts for developers")
    else:
        detail = f"not in this install, nor needed to run models; to work on the kernels, {HOW_TO_GET_THEM}"
        yield Check("simulator", Verdict.OK, detail)


_SLOWER = "this shape runs on the reference path, slower: please report what `cortexmlx doctor --json` says of it"

CHECKS: dict[str, Callable[[], Iterator[Check]]] = {
    "cortexmlx": _version,
    "machine": _machine,
    "packages": _packages,
    "BLAS": _blas,
    "device": _device,
    "weights": _float32,
    "starter model": _starter,
    "models": _models,
    "terminal": _terminal,
    "attention": _attention,
    "choice": kept_choices,
    "simulator": _simulator,
}
