"""One `cortexmlx bench`: the cases that were asked for, also when it is interrupted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cortexmlx.bench import session
from cortexmlx.cli.start import run
from support.bench_model import bench


def test_a_case_is_chosen_by_its_name_or_by_a_part_of_it(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def cases(text: str) -> list[str]:
        sizes = ["-n", "12", "-r", "1", "-o", "jsonl"]
        lines = bench(capsys, model, "--against", "mlx-lm", "--case", text, *sizes).splitlines()
        return [json.loads(line)["case"] for line in lines]

    assert cases("tg12 x1") == ["tg12 x1"]
    assert cases("tg12 x") == ["tg12 x1", "tg12 x8", "tg12 x16"]


def test_an_interrupt_keeps_the_cases_that_are_complete(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = session.compare

    def interrupted(case: Any, *arguments: Any) -> Any:
        if case.name != "pp24":
            raise KeyboardInterrupt
        return compare(case, *arguments)

    monkeypatch.setattr(session, "compare", interrupted)
    arguments = ["bench", model, "--against", "mlx-lm", "-p", "24", "-n", "8", "-r", "1"]
    assert run([*arguments, "-o", "json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert [c["case"] for c in report["comparisons"]] == ["pp24"] and "interrupted" in report["notes"][-1]
    assert run([*arguments, "--case", "tg8"]) == 130
    assert "pp24" not in capsys.readouterr().out
