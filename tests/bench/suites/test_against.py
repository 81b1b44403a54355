"""The cases beside mlx-lm, and what each should reach."""

from __future__ import annotations

import json

import pytest

from cortexmlx.cli.start import run
from support.models.bench_model import bench


def test_comparisons_name_their_targets(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, model, "--against", "mlx-lm", "-p", "64", "-n", "12", "-r", "1", "-o", "json")
    comparisons = json.loads(found)["comparisons"]
    targets = {c["case"]: (c["better"], c["target"]) for c in comparisons}
    assert targets == {
        "pp64": (">=", 1.0),
        "pp20 x16": (">=", 1.0),
        "tg12 x1": (">=", 0.95),
        "tg12 x8": (">=", 1.0),
        "tg12 x16": (">=", 1.0),
    }
    for c in comparisons:
        assert c["ratio"] == pytest.approx(c["ours"][0] / c["theirs"][0])
        assert c["same_tokens"] == c["requests"]


def cases(capsys: pytest.CaptureFixture[str], model: str, *arguments: str) -> dict[str, float]:
    """The names of the comparisons and their targets."""
    found = json.loads(bench(capsys, model, "--against", "mlx-lm", *arguments, "-r", "1", "-o", "json"))["comparisons"]
    assert all(c["same_tokens"] == c["requests"] for c in found)
    return {c["case"]: c["target"] for c in found}


def test_batch_and_depth_choose_the_rows_that_bench_measures(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts behind a depth for one row only, as without a peer."""
    assert cases(capsys, model, "-p", "8", "-n", "6", "-b", "1,18", "-d", "0,40") == {
        "pp8": 1.0,
        "pp8 x18": 1.0,
        "tg6": 0.95,
        "tg6 x18": 1.0,
        "pp8 @ d40": 1.0,
        "tg6 @ d40": 0.95,
        "tg6 @ d40 x18": 1.0,
    }


def test_lists_of_sizes_alone_are_more_of_the_usual_cases(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(cases(capsys, model, "-p", "8,16", "-n", "0")) == ["pp8", "pp16", "pp20 x16"]


def test_too_few_tokens_to_decode_together_are_refused_with_the_option(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", model, "--against", "mlx-lm", "-p", "0", "-n", "1", "-r", "1", "--case", "x8"]) == 1
    assert "never decode all at once: let them generate more tokens (-n)" in " ".join(capsys.readouterr().err.split())


def test_a_prompt_behind_a_depth_is_computed_alone_on_both_sides(model: str) -> None:
    """The tokens before it are neither computed again nor timed."""
    from cortexmlx import Engine
    from cortexmlx.bench.suites.against import ComparisonSizes, Contest, prefill_cases
    from cortexmlx.bench.suites.rows import SpeedTest

    with Engine(model, kv_memory="8MB") as engine:
        (case,) = prefill_cases(Contest(lambda: engine, 0), ComparisonSizes(rows=(SpeedTest(16, 0, 1, 200),)))
        before = engine.stats()
        ours = case.run_ours(0)
        found = engine.stats()
        assert found.cached_tokens - before.cached_tokens >= 199
        assert ours.requests[0].prompt_tokens == 200 + 1 + 16
        theirs = case.run_theirs(0)
        assert theirs.requests[0].prompt_tokens == 16  # mlx-lm has computed the answer's token ahead
        assert ours.tokens == theirs.tokens
