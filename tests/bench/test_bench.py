"""`cortexmlx bench` on a small random model: its rows, its formats, and mlx-lm beside it on the same weights."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from cortexmlx import Engine
from cortexmlx.bench import scheduler, session
from cortexmlx.bench.mlxlm import BatchSettings, MlxLm
from cortexmlx.bench.prompts import Prompts
from cortexmlx.bench.random_model import write_random_model
from cortexmlx.bench.subject import Cortex
from cortexmlx.bench.trace import Trace, Work
from cortexmlx.cli.start import run

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_random_model(tmp_path_factory.mktemp("bench"), SMALL | {"head_dim": 16, "vocab_size": 512}))


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Engine]:
    with Engine(model, max_rows=4, block_size=8) as engine:
        yield engine


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["bench", *arguments]) == 0
    return capsys.readouterr().out


# -- rows -------------------------------------------------------------------------------------------------------------


def test_rows_cover_every_combination(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    tests = ["-p", "24", "-n", "5", "-b", "1,2", "-d", "0,16", "--block-size", "8,16", "-r", "2"]
    report = json.loads(bench(capsys, model, *tests, "-o", "json"))
    found = [(r["block_size"], r["test"], r["batch"]) for r in report["rows"]]
    per_size = [("pp24", 1), ("pp24", 2), ("tg5", 1), ("tg5", 2), ("pp24 @ d16", 1), ("tg5 @ d16", 1), ("tg5 @ d16", 2)]
    assert found == [(size, *test) for size in (8, 16) for test in per_size]
    for row in report["rows"]:
        assert len(row["tokens_per_second"]) == 2
        assert all(rate > 0 for rate in row["tokens_per_second"])
        assert row["build_ms"] > 0
        assert row["wait_ms"] > 0
        assert row["peak_bytes"] >= report["model"]["weight_bytes"]
    assert report["machine"]["mlx_lm"] == "0.32.2"


def test_kv_memory_of_a_row_is_that_of_its_blocks_and_tail(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(bench(capsys, model, "-p", "100", "-n", "0", "-b", "1,2", "-r", "1", "-o", "json"))["rows"]
    per_token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, KV heads, dim, bytes
    for row in rows:
        blocks = row["batch"] * 4  # 100 tokens and one more in blocks of 32
        tail = row["batch"] * 16
        assert row["kv_bytes"] in (blocks * 32 * per_token, (blocks * 32 + tail) * per_token)


def test_json_lines_and_csv_hold_one_record_per_row(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    tests = ["-p", "8", "-n", "3", "-r", "1"]
    lines = [json.loads(line) for line in bench(capsys, model, *tests, "-o", "jsonl").splitlines()]
    assert [line["test"] for line in lines] == ["pp8", "tg3"]
    records = list(csv.DictReader(io.StringIO(bench(capsys, model, *tests, "-o", "csv"))))
    assert [record["test"] for record in records] == ["pp8", "tg3"]
    assert float(records[0]["mean_tokens_per_second"]) > 0


def test_markdown_names_the_machine_and_the_model(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = bench(capsys, model, "-p", "8", "-n", "3", "-r", "2")
    assert "mlx-lm 0.32.2" in text
    assert "llama" in text
    assert "| pp8 " in text
    assert " ± " in text


def test_without_any_model_random_weights_are_used_and_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cortexmlx.cli.bench.starter_path", lambda: None)
    assert "random weights" in bench(capsys, "-p", "8", "-n", "2", "-r", "1")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-p", "many"], 2, "not a list of numbers"),
        (["-b", "0"], 2, "0 is below 1"),
        (["-p", "0", "-n", "0"], 1, "nothing to measure"),
        (["-d", "40000", "-r", "1"], 1, "the model's context is 32768"),
        (["--against", "mlx-lm", "--case", "nothing like it"], 1, "no case has 'nothing like it'"),
    ],
)
def test_wrong_usage_is_explained(
    arguments: list[str], code: int, message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", model, *arguments]) == code
    assert message in capsys.readouterr().err


# -- beside mlx-lm ----------------------------------------------------------------------------------------------------


def test_both_sides_run_the_same_work_to_the_same_tokens(engine: Engine) -> None:
    prompts = Prompts(512, 0)
    theirs = MlxLm(engine.inspect(lambda core: core.loaded), BatchSettings(prefill_batch_size=2))
    for lengths in ([20], [5, 40, 17, 9, 30]):
        work = [Work(prompts.take(n), 6 + i) for i, n in enumerate(lengths)]
        mine, other = Cortex(engine).run(work), theirs.run(work)
        assert mine.tokens == other.tokens
        assert [len(t) for t in mine.tokens] == [w.max_tokens for w in work]


def test_a_late_request_arrives_when_the_first_has_its_tokens(engine: Engine) -> None:
    prompts = Prompts(512, 1)
    work = [Work(prompts.take(8), 30), Work(prompts.take(8), 4, after=10)]
    for side in (Cortex(engine), MlxLm(engine.inspect(lambda core: core.loaded))):
        trace = side.run(work)
        first, late = trace.requests
        assert len(late.tokens) == 4
        assert late.submitted.wall >= first.stamps[9].wall
        assert late.stamps[0].wall < first.stamps[-1].wall


def test_chat_turns_continue_the_conversation(engine: Engine) -> None:
    prompts = Prompts(512, 2)
    turns = [Work(prompts.take(20), 6), Work(prompts.take(5), 6)]
    answers = [
        side.chat(turns).tokens
        for side in (
            Cortex(engine),
            MlxLm(engine.inspect(lambda core: core.loaded), prompt_cache=True),
            MlxLm(engine.inspect(lambda core: core.loaded), prompt_cache=False),
        )
    ]
    assert answers[0] == answers[1] == answers[2]


def test_padded_batches_hold_more_kv_memory_than_blocks(engine: Engine) -> None:
    prompts = Prompts(512, 3)
    work = [Work(prompts.take(n), 4) for n in (400, 16, 16, 16)]
    settings = BatchSettings(completion_batch_size=4, prefill_batch_size=4, watch_kv=True)
    mine: Trace = Cortex(engine, watch_kv=True).run(work)
    other = MlxLm(engine.inspect(lambda core: core.loaded), settings).run(work)
    per_token = engine.info.kv_bytes_per_token
    assert 448 * per_token <= mine.kv_bytes < (448 + 4 * 40) * per_token
    assert other.kv_bytes >= 4 * 400 * per_token


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


def test_a_case_is_chosen_by_its_name_or_by_a_part_of_it(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def cases(text: str) -> list[str]:
        sizes = ["-n", "12", "-r", "1", "-o", "jsonl"]
        lines = bench(capsys, model, "--against", "mlx-lm", "--case", text, *sizes).splitlines()
        return [json.loads(line)["case"] for line in lines]

    assert cases("tg12 x1") == ["tg12 x1"]
    assert cases("tg12 x") == ["tg12 x1", "tg12 x8", "tg12 x16"]


def test_a_serving_case_reports_both_of_its_measures(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--suite", "serving", "--case", "long prompt arrives", "-r", "1"]
    text = bench(capsys, model, "--against", "mlx-lm", *chosen)
    assert "longest gap between tokens" in text
    assert "TTFT of the new prompt" in text


# -- the scheduler alone ----------------------------------------------------------------------------------------------


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


def test_the_scheduler_alone_is_measured_on_every_full_step() -> None:
    cost = scheduler.measure(rows=3, blocks=512, cached=20, steps=40)
    assert 30 <= len(cost.milliseconds) <= 40
    assert 0 < cost.median <= cost.worst
    assert "| 3 | 512 | 20 |" in scheduler.report([cost])
