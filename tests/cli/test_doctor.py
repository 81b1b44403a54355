"""What `cortexmlx doctor` prints, and when it fails."""

from __future__ import annotations

import json

import pytest

from cortexmlx.cli import checks
from cortexmlx.cli.checks import Check, Verdict
from cortexmlx.cli.start import run


def test_doctor_finds_this_installation_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert {
        "cortexmlx",
        "machine",
        "mlx",
        "mlx-lm",
        "BLAS",
        "device",
        "weights",
        "starter model",
        "attention",
    } <= found.keys()
    assert found["mlx-lm"]["verdict"] == "ok" and all(check["verdict"] != "fail" for check in found.values())


def test_doctor_says_what_to_do_and_fails_for_what_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> object:
        raise RuntimeError("no such thing")

    fine = Check("fine", Verdict.OK, "as it should be")
    worse = Check("worse", Verdict.WARN, "slow", "make it fast")
    monkeypatch.setattr(checks, "CHECKS", {"a": lambda: iter([fine, worse]), "b": broken})
    assert run(["doctor"]) == 1
    assert capsys.readouterr().out == (
        "ok    fine          as it should be\n"
        "warn  worse         slow\n"
        "                    -> make it fast\n"
        "fail  b             RuntimeError: no such thing\n"
        "                    -> run it with --debug, and report it\n"
    )
