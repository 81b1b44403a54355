"""What doctor looks at."""

from __future__ import annotations

import importlib.metadata
import io
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from cortexmlx.cli.doctor.checks import CHECKS, run_checks
from cortexmlx.cli.doctor.report import CheckStatus, DoctorCheck
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.metal.matmul.shape import MATMULS
from cortexmlx.metal.prefill import PREFILL_VARIANTS
from cortexmlx.metal.rules import VARIANTS
from cortexmlx.metal.tail_write import WRITES
from support.folders import cached_model
from support.kernels.broken_kernels import COMPILE_ERROR, raising


def test_a_wrong_version_of_mlx_lm_fails_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0" if name == "mlx-lm" else real(name))
    [check] = [check for check in run_checks() if check.name == "mlx-lm"]
    assert check.verdict is CheckStatus.FAIL and check.advice.startswith("pip install 'mlx-lm==")


def test_a_package_that_is_missing_fails_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "mlx-lm":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    [check] = [check for check in run_checks() if check.name == "mlx-lm"]
    assert check.verdict is CheckStatus.FAIL and check.detail == "not installed"
    assert check.advice.startswith("pip install 'mlx-lm==")


def test_another_system_than_apple_silicon_fails_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortexmlx.cli.doctor.checks.sys.platform", "darwin")
    monkeypatch.setattr("cortexmlx.cli.doctor.checks.platform.machine", lambda: "x86_64")
    [check] = CHECKS["machine"]()
    assert check.verdict is CheckStatus.FAIL and "arm64" in check.advice


def test_switches_that_make_a_cpu_slow_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    monkeypatch.setattr("cortexmlx.cli.doctor.checks.sys.platform", "linux")
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    monkeypatch.delenv("CORTEXMLX_DEQUANTIZE", raising=False)
    assert [check.verdict for check in CHECKS["weights"]()] == [CheckStatus.OK]
    monkeypatch.setenv("CORTEXMLX_DEQUANTIZE", "0")
    [check] = CHECKS["weights"]()
    assert check.verdict is CheckStatus.WARN and check.advice == "unset CORTEXMLX_DEQUANTIZE for speed"


MLX = importlib.metadata.version("mlx")


@pytest.mark.parametrize(
    ("system", "built", "opened", "verdict", "says"),
    [
        ("darwin", True, "Apple M4", CheckStatus.OK, ""),
        ("darwin", True, "Apple M5", CheckStatus.OK, ""),
        ("darwin", True, "Apple Paravirtual device", CheckStatus.WARN, "virtual machine"),
        ("darwin", True, None, CheckStatus.FAIL, "none can be opened"),
        (
            "darwin",
            False,
            None,
            CheckStatus.WARN,
            f"built without Metal: pip install --force-reinstall --no-cache mlx=={MLX}",
        ),
        ("darwin", True, "Apple M5, without NAX", CheckStatus.WARN, f"reinstall mlx=={MLX} mlx-metal=={MLX}, "),
        ("darwin", True, "Apple M5, unknown", CheckStatus.OK, ""),
        ("linux", False, None, CheckStatus.OK, ""),
    ],
)
def test_the_device_is_told_apart_from_one_that_only_seems_to_be_there(
    monkeypatch: pytest.MonkeyPatch, system: str, built: bool, opened: str | None, verdict: CheckStatus, says: str
) -> None:
    import mlx.core as mx

    monkeypatch.setattr("cortexmlx.cli.doctor.checks.sys.platform", system)
    monkeypatch.setattr(mx.metal, "is_available", lambda: built)
    monkeypatch.setattr("cortexmlx.bench.measure.machine.metal_device", lambda: opened)
    kernels = {"Apple M5, without NAX": False, "Apple M5, unknown": None}
    monkeypatch.setattr("cortexmlx.cli.doctor.checks.mlx_has_matrix_kernels", lambda: kernels.get(opened or "", True))
    monkeypatch.setattr("cortexmlx.cli.doctor.checks.has_matrix_units", lambda: "M5" in (opened or ""))
    [check] = CHECKS["device"]()
    assert check.verdict is verdict and says in check.advice
    assert check.detail.startswith(f"Metal GPU: {opened}" if opened else "CPU: ")
    assert ("cannot tell" in check.detail) is ("unknown" in (opened or ""))


@pytest.mark.parametrize("trusted", [True, False])
def test_a_kernel_that_does_not_compile_is_a_line_here_and_whole_in_json(
    trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda device: {"device_name": "Apple M4"})
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.fast, "metal_kernel", raising(RuntimeError(COMPILE_ERROR)))
    variants = (VARIANTS[0], PREFILL_VARIANTS[0], WRITES[0], MATMULS[0])
    monkeypatch.setattr("cortexmlx.metal.checked.CHECKED", variants)
    monkeypatch.setattr("cortexmlx.cli.doctor.checks.trusts_gpu", lambda: trusted)
    told: list[tuple[int, int]] = []
    backend, *kernels = CHECKS["attention"](False, lambda *progress: told.append(progress))
    assert backend.detail == "metal, 4 of 4 kernels checked" and told == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert [check.verdict for check in kernels] == [CheckStatus.FAIL if trusted else CheckStatus.WARN] * 4
    assert [check.advice.startswith("MLX's kernel serves instead: ") for check in kernels] == [False] * 3 + [True]
    for check, variant in zip(kernels, variants, strict=True):
        assert check.detail.startswith(f"{variant.label}: it does not compile (program_source:412:14: error: ")
        assert "\n" not in check.detail and "doctor --json" in check.advice
        assert check.message == f"RuntimeError: {COMPILE_ERROR.strip()}"


@pytest.mark.parametrize(
    ("free", "writable", "verdict", "advice"),
    [
        (10 * 2**30, True, CheckStatus.OK, ""),
        (2**30, True, CheckStatus.WARN, "set HF_HOME to a larger disk"),
        (10 * 2**30, False, CheckStatus.WARN, "you may not write in"),
    ],
)
def test_the_hubs_cache_is_counted_and_a_full_disk_warned_of(
    free: int, writable: bool, verdict: CheckStatus, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("cortexmlx.cli.doctor.checks.shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr("cortexmlx.cli.doctor.checks.os.access", lambda path, mode: writable)
    [empty] = CHECKS["models"]()
    assert empty.detail.startswith("0 of the hub, 0 B; ")
    snapshot = cached_model(tmp_path / "hub", "org/one")
    [check] = CHECKS["models"]()
    size = format_bytes((snapshot / "model.safetensors").stat().st_size)
    assert check.detail == f"1 of the hub, {size}; {format_bytes(free)} free in {tmp_path / 'hub'}"
    assert (check.verdict, advice in check.advice) == (verdict, True)


@pytest.mark.parametrize(
    ("term", "encoding", "verdict", "says"),
    [
        ("xterm", "utf-8", CheckStatus.OK, "colours, utf-8"),
        ("dumb", "utf-8", CheckStatus.WARN, "no colours, utf-8"),
        ("xterm", "latin-1", CheckStatus.WARN, "colours, latin-1"),
    ],
)
def test_what_a_terminal_cannot_show_is_warned_of(
    term: str, encoding: str, verdict: CheckStatus, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setattr(sys, "stdout", Terminal(io.BytesIO(), encoding=encoding))
    [check] = CHECKS["terminal"]()
    assert (check.verdict, check.detail) == (verdict, f"80x24, {says}")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    [check] = CHECKS["terminal"]()
    assert (check.verdict, check.detail) == (CheckStatus.OK, "none: plain text is written")


def test_an_install_without_the_developers_parts_is_told_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    [check] = CHECKS["simulator"]()
    assert (check.verdict, check.detail) == (CheckStatus.OK, "installed, with the other parts for developers")
    monkeypatch.setattr("cortexmlx.system.developer_parts.DEVELOPER_PARTS", ("cortexmlx.metal.not_here",))
    [check] = CHECKS["simulator"]()
    assert check.verdict is CheckStatus.OK and check.detail.startswith("not in this install")
    assert "pip install -e '.[dev]'" in check.detail


def test_a_line_is_plain_data_for_json() -> None:
    assert asdict(DoctorCheck("device", CheckStatus.OK, "CPU")) == {
        "name": "device",
        "verdict": "ok",
        "detail": "CPU",
        "advice": "",
        "message": "",
    }
