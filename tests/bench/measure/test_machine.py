"""What a figure was measured on: this machine, and the versions that are installed."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest

from cortexmlx.bench.measure.machine import BenchMachine


def test_it_names_what_runs_here() -> None:
    here = BenchMachine.detect()
    assert (here.cortexmlx, here.mlx, here.mlx_lm) == (version("cortexmlx"), version("mlx"), version("mlx-lm"))
    assert here.python == platform.python_version() and platform.machine() in here.system
    assert 1 <= here.cpus <= (os.cpu_count() or 1)
    assert here.device == ("Metal GPU" if mx.metal.is_available() else "CPU") and here.chip


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux says so there")
def test_its_memory_is_at_most_what_the_system_has() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 2**28 < BenchMachine.detect().memory <= total


def test_three_lines_say_it_to_people() -> None:
    machine = replace(BenchMachine.detect(), chip="A chip", cpus=12, memory=48 * 2**30, device="Metal GPU", mlx="1.2.3")
    first, second, third = replace(machine, load=1.5).lines()
    assert first == "A chip, 12 CPUs, 48 GiB memory, MLX on Metal GPU, load 1.5"
    assert ", mlx 1.2.3, mlx-lm " in second and machine.system in second and third == machine.blas
