"""A line of the report as data."""

from __future__ import annotations

from dataclasses import asdict

from cortexmlx.cli.doctor.check import Check, Verdict


def test_a_line_is_plain_data_for_json() -> None:
    assert asdict(Check("device", Verdict.OK, "CPU")) == {
        "name": "device",
        "verdict": "ok",
        "detail": "CPU",
        "advice": "",
        "message": "",
    }
