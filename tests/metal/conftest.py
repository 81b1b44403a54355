"""The devices that the kernels' cases run on: the simulator by default, an Apple GPU with `-m metal`, an NVIDIA GPU
with `-m cuda`. A test that takes `kernels`, `factory` or `tolerance` runs on each.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.metal.kernels import DecodeKernels, KernelFactory
from cortexmlx.metal.lab import sim
from cortexmlx.metal.lab.cuda import cuda_factory
from cortexmlx.system.machine import metal_device
from support.kernels.paged_problem import GPU_TOLERANCE, TOLERANCE

FACTORIES: dict[str, Any] = {
    "sim": lambda: sim.metal_kernel,
    "metal": lambda: mx.fast.metal_kernel if metal_device() is not None else None,
    "cuda": lambda: cuda_factory if mx.cuda.is_available() else None,
}


@pytest.fixture(
    scope="module",
    params=["sim", pytest.param("metal", marks=pytest.mark.metal), pytest.param("cuda", marks=pytest.mark.cuda)],
)
def device(request: pytest.FixtureRequest) -> str:
    """The name of a device that is here."""
    name: str = request.param
    if FACTORIES[name]() is None:
        pytest.skip(f"no {name} device")
    return name


@pytest.fixture(scope="module")
def factory(device: str) -> KernelFactory:
    """What makes kernels of their texts there."""
    made: KernelFactory = FACTORIES[device]()
    return made


@pytest.fixture(scope="module")
def kernels(factory: KernelFactory) -> DecodeKernels:
    """The decode kernels there."""
    return DecodeKernels(factory)


@pytest.fixture(scope="module")
def tolerance(device: str) -> dict[str, float]:
    """How far a result may be from float64 there, by the dtype of the queries."""
    return TOLERANCE if device == "sim" else GPU_TOLERANCE
