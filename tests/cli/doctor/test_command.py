"""What `cortexmlx doctor` prints, and when it fails."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx.cli.doctor import checks
from cortexmlx.cli.doctor.report import CheckStatus, DoctorCheck
from cortexmlx.cli.start import run
from cortexmlx.metal.rules import Variant
from support.kernels.broken_kernels import COMPILE_ERROR, copying, dropped, raising


def test_doctor_finds_this_installation_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    names = "cortexmlx, machine, mlx, mlx-lm, BLAS, device, weights, starter model, attention"
    assert {*names.split(", ")} <= found.keys()
    assert found["mlx-lm"]["verdict"] == "ok" and all(check["verdict"] != "fail" for check in found.values())


@pytest.mark.parametrize(
    ("factory", "says", "message"),
    [
        (dropped("cortex_", zeros=True), "its decode launch was dropped", ""),
        (
            raising(RuntimeError(COMPILE_ERROR)),
            "it does not compile (program_source:412:14: error: ",
            f"RuntimeError: {COMPILE_ERROR.strip()}",
        ),
        (copying(all_inputs=False), "its decode launch read a copy of the keys and values", ""),
    ],
    ids=["zeros", "a compile error", "copies"],
)
def test_doctor_tells_why_a_kernel_cannot_be_used(
    factory: Any, says: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a line for people, and whole for whoever mends it: where MLX has a GPU and its kernels are these."""
    small = Variant("float32", "float32", 16, 16, 8, 2)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda device: {"device_name": "Apple M4"})
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.fast, "metal_kernel", factory)
    monkeypatch.setattr("cortexmlx.metal.checked.CHECKED", (small,))
    monkeypatch.setattr(checks, "CHECKS", {"attention": checks.CHECKS["attention"]})
    monkeypatch.setattr(checks, "trusts_gpu", lambda: False)
    assert run(["doctor", "--json"]) == 0, "the reference path serves, and a virtual GPU decides nothing"
    assert json.loads(capsys.readouterr().out)[1]["verdict"] == "warn"
    monkeypatch.setattr(checks, "trusts_gpu", lambda: True)
    assert run(["doctor"]) == 1
    _, line, advice = capsys.readouterr().out.splitlines()
    assert line.startswith(f"fail  kernel        {small.label}: {says}") and "reference path" in advice
    assert run(["doctor", "--json"]) == 1
    _, found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "fail" and says in found["detail"] and found["message"] == message


def test_doctor_says_what_to_do_and_fails_for_what_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> object:
        raise RuntimeError("no such thing")

    fine = DoctorCheck("fine", CheckStatus.OK, "as it should be")
    worse = DoctorCheck("worse", CheckStatus.WARN, "slow", "make it fast")
    monkeypatch.setattr(checks, "CHECKS", {"a": lambda: iter([fine, worse]), "b": broken})
    assert run(["doctor"]) == 1
    assert capsys.readouterr().out == (
        "ok    fine          as it should be\n"
        "warn  worse         slow\n"
        "                    -> make it fast\n"
        "fail  b             RuntimeError: no such thing\n"
        "                    -> run it with --debug, and report it\n"
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_how_many_kernels_remain_and_a_pipe_nothing(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attention(quick: bool, on_kernel: checks.OnKernel) -> Any:
        assert quick
        for number in range(3):
            on_kernel(number, 3)
            seconds[0] += 60.0
            yield DoctorCheck("kernel", CheckStatus.OK, f"number {number}")
        on_kernel(3, 3)

    seconds = [0.0]
    monkeypatch.setattr("cortexmlx.cli.doctor.command.clock.monotonic", lambda: seconds[0])
    monkeypatch.setattr("cortexmlx.cli.doctor.command.console.is_terminal", lambda stream: terminal)
    monkeypatch.setattr(checks, "check_attention", attention)
    monkeypatch.setattr(checks, "CHECKS", {"attention": attention})
    assert run(["doctor", "--quick"]) == 0
    out, err = capsys.readouterr()
    assert out.count("kernel  ") == 3
    texts = [
        f"checking kernels: {left}"
        for left in ("3 of 3 remain", "2 of 3 remain, about 2:00 left", "1 of 3 remain, about 1:00 left")
    ]
    assert err == ("".join(f"{text}\r\x1b[K" for text in texts) if terminal else "")


def test_quick_times_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--quick", "--time", "smollm2"]) == 2
    assert "checks no kernels" in capsys.readouterr().err
