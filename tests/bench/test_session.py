"""One `cortexmlx bench`: the cases that were asked for, also when it is interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine
from cortexmlx.bench import session
from cortexmlx.bench.measure.engines import BenchPlan
from cortexmlx.bench.measure.subject import RequestsInFlight
from cortexmlx.bench.measure.yardstick import Yardstick
from cortexmlx.bench.suites.against import ComparisonSizes
from cortexmlx.cli.start import run
from support.models.bench_model import bench


def test_a_case_is_chosen_by_its_name_or_by_a_part_of_it(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def cases(text: str) -> list[str]:
        sizes = ["-n", "12", "-r", "1", "-o", "jsonl"]
        lines = bench(capsys, model, "--against", "mlx-lm", "--case", text, *sizes).splitlines()
        return [json.loads(line)["case"] for line in lines]

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
    sample, calls = Yardstick.add_sample, [0]

    def interrupted(self: Yardstick) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        sample(self)

    monkeypatch.setattr(Yardstick, "add_sample", interrupted)
    assert run(["bench", model, "-p", "8", "-n", "4", "-r", "5", "-o", "json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert [(row["test"], len(row["tokens_per_second"])) for row in report["rows"]] == [("pp8", 1), ("tg4", 2)]
    assert report["interrupted"] and "interrupted" in report["notes"][-1]


def test_what_is_compared_is_measured_in_rounds_each_with_engines_of_its_own(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, closed = list[Engine](), list[Engine]()
    open_engines, close = session.open_engines, Engine.close

    def watched(*arguments: Any, **options: Any) -> dict[int, Engine]:
        assert all(engine in closed for engine in opened), "two rounds' weights at once"
        found = open_engines(*arguments, **options)
        opened.extend(found.values())
        return found

    def noted(self: Engine) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(session, "open_engines", watched)
    monkeypatch.setattr(Engine, "close", noted)
    sizes = ["-p", "8", "-n", "4", "-b", "2"]
    bench(capsys, model, *sizes, "-r", "7", "--save", str(tmp_path / "a.json"))
    kept = json.loads((tmp_path / "a.json").read_text())
    assert len(opened) == 5
    yardstick = kept["compared"]["yardstick"]
    for series in kept["compared"]["series"]:
        assert series["rounds"] == [0, 1, 2, 2, 3, 4, 4] and len(series["values"]) == 7
        samples = yardstick[f"{series['machine']}, {series['clock']}"]
        assert len(samples) == 7 * 2 + 5 and min(samples) <= min(series["beside"]) <= max(samples)
    opened.clear()
    bench(capsys, model, *sizes, "-r", "7")
    assert len(opened) == 1, "nobody compares"


def test_memory_of_the_yardstick_is_not_the_models(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(bench(capsys, model, "-p", "8", "-n", "0", "-r", "1", "-o", "json"))
    assert report["rows"][0]["peak_bytes"] < 2**27, "a model of some kilobytes"


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
