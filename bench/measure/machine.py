"""The machine that figures were measured on: chip, memory, system, versions, BLAS, and its other load."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from cortexmlx.cpu import blas
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.system.machine import memory_bytes, metal_device


@dataclass(frozen=True)
class BenchMachine:
    """The machine and the software that a benchmark ran on."""

    chip: str
    cpus: int
    """CPUs that this process may use."""
    memory: int
    """Bytes of memory."""
    device: str
    system: str
    python: str
    cortexmlx: str
    mlx: str
    mlx_lm: str
    blas: str
    load: float = 0.0
    """How many processes wanted a CPU in the minute before the benchmark."""

    @classmethod
    def detect(cls) -> BenchMachine:
        """Return the machine that this process runs on."""
        return cls(
            chip=_chip_name(),
            cpus=blas.usable_cpus(),
            memory=memory_bytes(),
            device="CPU" if metal_device() is None else "Metal GPU",
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            python=platform.python_version(),
            cortexmlx=version("cortexmlx"),
            mlx=version("mlx"),
            mlx_lm=version("mlx-lm"),
            blas=blas.status(),
            load=round(os.getloadavg()[0], 1),
        )

    def lines(self) -> list[str]:
        """Return hardware, software and BLAS as lines for people."""
        return [
            f"{self.chip}, {self.cpus} CPUs, {format_bytes(self.memory)} memory, "
            f"MLX on {self.device}, load {self.load}",
            self.software(),
            self.blas,
        ]

    def software(self) -> str:
        """Return versions and system in one line."""
        versions = f"cortexmlx {self.cortexmlx}, mlx {self.mlx}, mlx-lm {self.mlx_lm}, Python {self.python}"
        return f"{versions}, {self.system}"


def _chip_name() -> str:
    gpu = metal_device()
    if gpu is not None:
        return gpu
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
