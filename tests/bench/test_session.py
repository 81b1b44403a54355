"""One `cortexmlx bench`: the cases that were asked for, also when it is interrupted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cortexmlx import Engine
from cortexmlx.bench import session
from cortexmlx.bench.measure.engines import BenchPlan
from cortexmlx.bench.measure.subject import RequestsInFlight
from cortexmlx.bench.suites import rows
from cortexmlx.bench.suites.against import ComparisonSizes
from cortexmlx.cli.start import run
from support.models.bench_model import bench


def test_a_case_is_chosen_by_its_name_or_by_a_part_of_it(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def cases(text: str) -> list[str]:
        sizes = ["-n", "12", "-r", "1", "-o", "json"]
        records = json.loads(bench(capsys, model, "--against", "mlx-lm", "--case", text, *sizes))["comparisons"]
        return [record["case"] for record in records]

    assert cases("tg12 x1") == ["tg12 x1"]
    assert cases("x8") == ["tg12 x8"]


def test_an_interrupt_keeps_the_cases_that_are_complete(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = session.compare_case

    def interrupted(case: Any, *arguments: Any) -> Any:
        if case.name != "pp24":
            raise KeyboardInterrupt
        return compare(case, *arguments)

    monkeypatch.setattr(session, "compare_case", interrupted)
    arguments = ["bench", model, "--against", "mlx-lm", "-p", "24", "-n", "8", "-r", "1"]
    assert run([*arguments, "-o", "json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert [c["case"] for c in report["comparisons"]] == ["pp24"] and "interrupted" in report["notes"][-1]
    assert run([*arguments, "--case", "tg8"]) == 130
    assert "pp24" not in capsys.readouterr().out


def test_an_interrupt_keeps_the_runs_so_far(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = rows._run_test, [0]

    def interrupted(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2 + 4:  # two to warm up
            raise KeyboardInterrupt
        return own(*arguments)

    monkeypatch.setattr(rows, "_run_test", interrupted)
    assert run(["bench", model, "-p", "8", "-n", "4", "-r", "5", "-o", "json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert [(row["test"], len(row["tokens_per_second"])) for row in report["rows"]] == [("pp8", 1), ("tg4", 2)]
    assert report["interrupted"] and "interrupted" in report["notes"][-1]


def test_tokens_counted_are_tokens_produced(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own counters, and every event that it sent, are the judges."""
    engines, events = list[Engine](), [0]
    opened, taken = session.open_engines, RequestsInFlight._record_token

    def watched(*arguments: Any, **options: Any) -> dict[int, Engine]:
        found = opened(*arguments, **options)
        engines.extend(found.values())
        return found

    def counted(self: RequestsInFlight, request: int, token: int) -> None:
        events[0] += 1
        taken(self, request, token)

    closed = list[tuple[int, int]]()
    close = Engine.close

    def note(self: Engine) -> None:
        if self in engines:
            stats = self.stats()
            closed.append((stats.prompt_tokens, stats.generated_tokens))
            engines.remove(self)
        close(self)

    monkeypatch.setattr(session, "open_engines", watched)
    monkeypatch.setattr(RequestsInFlight, "_record_token", counted)
    monkeypatch.setattr(Engine, "close", note)
    rows = json.loads(bench(capsys, model, "-p", "24", "-n", "9", "-b", "3", "-r", "2", "-o", "json"))["rows"]
    [(prompts, generated)] = closed
    # Two runs and one to warm up, of three rows: a prompt and 2 tokens, or one token and 10.
    assert prompts == 3 * 3 * (24 + 1) and generated == events[0] == 3 * 3 * (2 + 10)
    assert [row["tokens"] for row in rows] == [2 * 3 * 24, pytest.approx(2 * 3 * 9, abs=2 * 4)]
    decode = rows[1]
    assert decode["tokens"] <= 2 * 3 * 9  # the first tokens are the prompt's


def test_a_figure_of_fewer_tokens_than_were_asked_for_is_refused(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = RequestsInFlight._record_token

    def lost(self: RequestsInFlight, request: int, token: int) -> None:
        if self._recorder._tokens[request][2:] == []:
            taken(self, request, token)

    monkeypatch.setattr(RequestsInFlight, "_record_token", lost)
    assert run(["bench", model, "-p", "0", "-n", "9", "-r", "1"]) == 1
    assert "has 3 of 10 tokens: no figure" in capsys.readouterr().err


def test_what_is_warmed_up_before_the_first_pair_is_said(model: str) -> None:
    """It takes minutes with a large model, in which "loading: 100%" was all there was to see."""
    said: list[str] = []
    plan = BenchPlan(model, (), None, "auto", 1, 0, said.append)
    session.compare_with_mlx_lm(plan, "basic", ["pp20 x16"], ComparisonSizes((24,), generates=(8,)), 16)
    loaded = max(n for n, what in enumerate(said) if what.endswith("100%"))
    pair = next(n for n, what in enumerate(said) if "pair 1 of 1" in what)
    assert said[loaded + 1] == "warming up, 1 prompt of 64 tokens: cortexmlx"
    assert pair - loaded - 1 == 2 * 2 * len(session.WARM_UP) and said[pair - 1].endswith(
        "8 prompts of 300 tokens: mlx-lm"
    )
