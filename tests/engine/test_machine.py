"""How much memory there is, where a container allows less than the machine has."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.system import machine
from cortexmlx.system.machine import (
    has_matrix_units,
    memory_bytes,
    metal_device,
    mlx_has_matrix_kernels,
    trusts_gpu,
    uses_matrix_units,
    working_set_bytes,
)


def test_memory_is_the_containers_where_that_is_less(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_text
    limits = {"/sys/fs/cgroup/memory.max": "1048576\n"}

    def read(self: Path, *args: Any, **kwargs: Any) -> str:
        return limits.get(str(self)) or real(self, *args, **kwargs)

    whole = memory_bytes()
    monkeypatch.setattr(Path, "read_text", read)
    assert memory_bytes() == 1048576 < whole
    limits["/sys/fs/cgroup/memory.max"] = "max\n"
    assert memory_bytes() == whole


def test_models_may_use_a_part_of_the_memory() -> None:
    assert memory_bytes() / 2 <= working_set_bytes() <= memory_bytes()


def test_a_gpu_is_there_when_metal_says_so_and_the_device_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's Metal build says that Metal is available wherever it runs; only the device's absence tells the truth."""
    information: dict[str, Any] = {"device_name": "Apple M3 Max", "max_recommended_working_set_size": 1 << 30}

    def device_info(device: Any) -> dict[str, Any]:
        if not information:
            raise RuntimeError("[metal::load_device] No Metal device available.")
        assert device == mx.gpu
        return information

    monkeypatch.setattr(mx, "device_info", device_info)
    monkeypatch.setattr("cortexmlx.system.machine.sys.platform", "darwin")
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert metal_device() is None
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert metal_device() == "Apple M3 Max" and working_set_bytes() == 1 << 30
    information.clear()
    assert metal_device() is None and working_set_bytes() == memory_bytes() * 3 // 4


@pytest.mark.parametrize("kernels", [False, True, None])
@pytest.mark.parametrize(
    ("architecture", "system", "units"),
    [
        ("applegpu_g17s", "25.2.0", True),
        ("applegpu_g17s", "25.1.0", False),
        ("applegpu_g16d", "26.0.0", False),
        ("applegpu_g17p", "25.4.0", False),
        ("applegpu_g18p", "25.4.0", True),
        ("", "25.4.0", False),
        ("applegpu_g17s", "", False),
    ],
)
def test_matrix_units_came_with_the_m5_and_a_system_that_knows_them(
    monkeypatch: pytest.MonkeyPatch, architecture: str, system: str, units: bool, kernels: bool | None
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda device: {"device_name": "a GPU", "architecture": architecture})
    monkeypatch.setattr("cortexmlx.system.machine.platform.release", lambda: system)
    monkeypatch.setattr("cortexmlx.system.machine.mlx_has_matrix_kernels", lambda: kernels)
    assert has_matrix_units() is units and uses_matrix_units() is (units and kernels is True)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert not has_matrix_units()


def test_freed_memory_is_given_back_where_the_c_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    library = SimpleNamespace(malloc_trim=asked.append)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: library)
    machine.release_freed_memory()
    assert asked == [0]
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: SimpleNamespace())
    machine.release_freed_memory()


def missing(name: str) -> Any:
    raise PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("library", "tag", "found"),
    [
        (b"\0steel_gemm_nax_float\0qmm_t_nax_half\0sdpa_vector\0", "macosx_15_0_arm64", True),
        (b"\0steel_gemm_float\0" * 1000, "macosx_26_0_arm64", False),
        (b"\0arange_float\0rms_norm\0", "macosx_26_0_arm64", None),  # the others are compiled when they are needed
        (b"\0arange_float\0rms_norm\0", None, None),
        (None, "macosx_15_0_arm64", False),
        (None, "macosx_26_0_arm64", None),
        (b"", "macosx_14_0_arm64", False),
        (None, None, None),
    ],
)
@pytest.mark.parametrize("place", ["mlx/lib", "mlx", "prefix/lib"])
def test_a_build_of_mlx_is_asked_for_its_kernels_and_else_for_its_tag(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    library: bytes | None,
    tag: str | None,
    found: bool | None,
    place: str,
) -> None:
    """In a wheel's place, beside the module, and in the environment's lib, where conda has it."""
    (tmp_path / place).mkdir(parents=True)
    if library is not None:
        (tmp_path / place / "mlx.metallib").write_bytes(library)
    if tag is not None:
        wheel = tmp_path / "mlx_metal-0.32.4.dist-info"
        wheel.mkdir()
        (wheel / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-metal\nVersion: 0.32.4\n")
        (wheel / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: py3-none-{tag}\n")
    else:
        monkeypatch.setattr("cortexmlx.system.machine.importlib.metadata.distribution", missing)
    monkeypatch.setattr(mx, "__file__", str(tmp_path / "mlx" / "core.so"))
    monkeypatch.setattr("cortexmlx.system.machine.sys.prefix", str(tmp_path / "prefix"))
    monkeypatch.syspath_prepend(tmp_path)
    mlx_has_matrix_kernels.cache_clear()
    assert mlx_has_matrix_kernels() is found
    mlx_has_matrix_kernels.cache_clear()


@pytest.mark.parametrize(
    ("name", "virtual", "device", "trusted"),
    [
        ("Apple M4", "0\n", mx.gpu, True),
        ("Apple M4", "1\n", mx.gpu, False),
        ("Apple M4", "0\n", mx.cpu, False),
        ("Apple Paravirtual device", "0\n", mx.gpu, False),
        (None, "0\n", mx.gpu, False),
    ],
)
def test_a_gpu_is_trusted_if_it_is_real_and_computes(
    monkeypatch: pytest.MonkeyPatch, name: str | None, virtual: str, device: Any, trusted: bool
) -> None:
    monkeypatch.setattr(machine, "metal_device", lambda: name)
    monkeypatch.setattr(mx, "default_device", lambda: device)
    monkeypatch.setattr("cortexmlx.system.machine.sys.platform", "darwin")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=virtual))
    assert trusts_gpu() is trusted
