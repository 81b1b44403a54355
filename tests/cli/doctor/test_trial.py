"""The short run for the report: what fails is told in its place."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from cortexmlx.cli.doctor import trial
from cortexmlx.cli.doctor.report import CheckStatus
from cortexmlx.cli.doctor.trial import check_arena_writes
from cortexmlx.stats import ArenaWrites, CommandBuffers


def test_kernels_are_timed_only_where_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trial.measure_kernels(None) == []  # type: ignore[arg-type]
    monkeypatch.setattr("cortexmlx.attention.backends.auto_backend_name", lambda: "metal")
    monkeypatch.setattr(
        "cortexmlx.bench.suites.known_models.measure_models", lambda _, attention: iter([{1: attention}])
    )
    assert trial.measure_kernels(None) == [{1: "metal"}]  # type: ignore[arg-type]


class Engine:
    """An engine that can be opened and closed."""

    closed = 0
    info: Any = type("Info", (), {"name": "tiny", "dtype": "float16"})

    def __init__(self, model: str, **options: Any) -> None:
        self.model = model

    def __enter__(self) -> Engine:
        return self

    def stats(self) -> Any:
        return type("Stats", (), {"arena_writes": ArenaWrites(), "command_buffers": None})

    def __exit__(self, *_: object) -> None:
        Engine.closed += 1


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no such thing")


def test_a_section_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Engine.closed, said = 0, list[str]()
    monkeypatch.setattr("cortexmlx.engine.Engine", Engine)
    monkeypatch.setattr(trial, "SECTIONS", {"one": broken, "two": lambda engine: engine.model})
    found, lines = trial.run_trial(said.append)
    assert (
        [line.name for line in lines] == ["KV cache"]
        and found["one"] == {"error": "RuntimeError: no such thing"}
        and found["two"]
    )
    assert said[1:] == ["one", "two"] and Engine.closed == 1


def test_an_engine_that_does_not_open_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortexmlx.engine.Engine", broken)
    found, lines = trial.run_trial(lambda what: None)
    assert list(found) == ["model"] and not lines and found["model"]["error"] == "RuntimeError: no such thing"


def test_an_installation_that_is_not_whole_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cortexmlx.engine", None)
    found, lines = trial.run_trial(lambda what: None)
    assert found["model"]["error"].startswith("ModuleNotFoundError: ") and not lines


def test_both_sides_go_first_in_turn_and_time_ends_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, Any]] = []

    class Side:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, work: Any) -> Any:
            ran.append((self.name, work[0].prompt))
            return type("RunTrace", (), {"tokens": 1, "decode_rate": lambda self: type("Figure", (), {"wall": 2.0})})()

    class Contest:
        def __init__(self, opened: Any, seed: int) -> None:
            pass

        def make_prompts(self, case: str, number: int) -> Any:
            return type("PromptStream", (), {"next_prompt": lambda self, count: (number,) * count})()

        def make_cortex(self) -> Side:
            return Side("ours")

        def make_mlx_lm(self) -> Side:
            return Side("theirs")

    monkeypatch.setattr("cortexmlx.bench.suites.against.Contest", Contest)
    found = trial.compare_decode(None)  # type: ignore[arg-type]
    order = ["ours", "theirs", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert [name for name, _ in ran] == order
    assert [prompt[0] for _, prompt in ran] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found["same_tokens"] == [True] * 3 and found["mlx_lm_tokens_per_second"] == [2.0] * 3
    ran.clear()
    monkeypatch.setattr(trial, "MAX_SECONDS", -1.0)
    assert len(trial.compare_decode(None)["same_tokens"]) == 1  # type: ignore[arg-type]


def stats(writes: ArenaWrites, buffers: CommandBuffers | None = None) -> Any:
    return type("Stats", (), {"arena_writes": writes, "command_buffers": buffers})


@pytest.mark.parametrize(
    ("writes", "verdict", "says"),
    [
        (ArenaWrites(), CheckStatus.OK, "not measured"),
        (ArenaWrites(60), CheckStatus.OK, "in place in all of 60 measured writes"),
        (ArenaWrites(60, 2, 8 << 20), CheckStatus.WARN, "2 of 60 measured writes copied a part of it, 8 MiB"),
    ],
)
def test_copies_are_warned_of_with_their_size(writes: ArenaWrites, verdict: CheckStatus, says: str) -> None:
    [check] = check_arena_writes(stats(writes))
    assert check.verdict is verdict and says in check.detail


def test_a_cut_queue_is_warned_of_with_the_variables_that_mend_it() -> None:
    _, cut = check_arena_writes(stats(ArenaWrites(), CommandBuffers(30, 50, 50, 1 / 3)))
    assert cut.verdict is CheckStatus.WARN and "about 30 a step" in cut.detail and "33% of a step" in cut.detail
    assert "MLX_MAX_OPS_PER_BUFFER" in cut.advice and "MLX_MAX_MB_PER_BUFFER" in cut.advice
    _, whole = check_arena_writes(stats(ArenaWrites(), CommandBuffers(6, 100, 1_000_000, 1.0)))
    assert whole.verdict is CheckStatus.OK and not whole.advice and "1,000,000 Mi elements" in whole.detail
