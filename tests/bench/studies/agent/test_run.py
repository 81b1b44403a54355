"""An agent's trace: what it counts, that nothing is computed twice, and that killing the engine ends nothing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine
from cortexmlx.bench.studies.agent import run as agent
from cortexmlx.bench.studies.agent.run import (
    ActResult,
    Agent,
    Process,
    Took,
    first_token_of_mlx_lm,
    first_tokens_anew,
    new_tokens,
    run,
)
from cortexmlx.bench.studies.agent.script import Kind, make_script
from support.models.tiny import tokens_of, write_tiny

SMALL: dict[str, Any] = {"turns": 8, "output": (5, 60), "answer": 9}


def record(prompt: list[int], answer: list[int], cached: int = 0) -> ActResult:
    return ActResult(Kind.ASK, tuple(prompt), cached, tuple(answer), Took(0.0, 0.0))


def test_new_is_what_no_text_before_begins_with() -> None:
    records = [
        record([1, 2, 3], [4, 5]),
        record([1, 2, 3, 4, 5, 6], [7]),
        record([1, 2, 9], [3]),
        record([1, 2, 9], [3]),
    ]
    assert new_tokens(records) == [3, 2, 1, 1], "5 was never computed, and of a repeat the last token is"
    assert agent.ratio_of(records) == 15 / 7


@pytest.mark.parametrize(
    ("name", "memory", "most"),
    [
        ("lfm2", "8MB", 1.1),
        pytest.param("llama", "4MB", 1.05, marks=pytest.mark.slow),
        pytest.param("windowed llama", "4MB", 1.05, marks=pytest.mark.slow),
        pytest.param("qwen3_next", "8MB", 1.1, marks=pytest.mark.slow),
        pytest.param("gemma3_text", "4MB", 1.05, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_computed_twice_and_the_tokens_are_those_without_a_cache(
    tmp_path: Path, name: str, memory: str, most: float
) -> None:
    model = write_tiny(tmp_path / "model", name, max_position_embeddings=4096)
    with Engine(model, kv_memory=memory, block_size=8, max_rows=8) as engine:
        records = list(run(make_script(1, **SMALL, kills=False), Agent(engine, tmp_path / "talk.json")))
        assert len(records) == 18 and all(same for same, _ in first_tokens_anew(engine, records))
        engine.check_invariants()
    assert agent.ratio_of(records) <= most


@pytest.mark.slow
def test_in_a_tight_arena_the_tokens_are_the_same(tmp_path: Path) -> None:
    """Room for little more than the longest prompt: forks and older turns are evicted on the way."""
    model = write_tiny(tmp_path / "model", "llama", max_position_embeddings=4096)
    with Engine(model, kv_memory="180KB", block_size=8, max_rows=2) as engine:
        records = list(run(make_script(1, **SMALL, kills=False), Agent(engine, tmp_path / "talk.json")))
        longest = max(len(r.prompt) for r in records)
        assert engine.longest_request < 1.5 * longest
        assert all(same for same, _ in first_tokens_anew(engine, records))
        engine.check_invariants()


def test_mlx_lm_goes_on_from_its_file_with_the_same_token(tmp_path: Path, tiny: Any, monkeypatch: Any) -> None:
    """What it is timed at is the answer to the whole prompt."""
    import mlx.core as mx

    from cortexmlx.models import load_model

    theirs = importlib.import_module("mlx_lm.generate")
    seen: list[int] = []
    steps = theirs.generate_step

    def noted(*args: Any, **options: Any) -> Any:
        for token, logprobs in steps(*args, **options):
            seen.append(int(token))
            yield token, logprobs

    monkeypatch.setattr(theirs, "generate_step", noted)
    loaded = load_model(tiny("llama"))
    before = tokens_of(40, seed=1)
    for prompt in ([*before, 7, 8, 9], [*before[:20], *tokens_of(9, seed=2)], before[:11]):
        assert first_token_of_mlx_lm(loaded, before, prompt, tmp_path).wall > 0
        told = seen[-1]
        next(noted(mx.array(prompt), loaded.model, max_tokens=1))
        assert told == seen[-1]


@pytest.mark.slow
def test_a_killed_engine_is_started_again_and_goes_on(tmp_path: Path) -> None:
    """Without a disk tier everything is computed again, and the tokens are the same. (How far a cancelled answer comes
    is the machine's to say.)
    """
    acts = [act for act in make_script(1, **SMALL) if act.kind is not Kind.CANCEL]
    model = write_tiny(tmp_path / "model", "llama", max_position_embeddings=4096)
    options: dict[str, Any] = {"kv_memory": "4MB", "block_size": 8}
    process = Process({"model": str(model), "file": str(tmp_path / "talk.json"), "engine": options})
    try:
        records = list(run(acts, process))
    finally:
        process.close()
    assert [r.killed for r in records].count(True) == 2
    with Engine(model, **options) as engine:
        going_on = [act for act in acts if act.kind is not Kind.KILL]
        alone = list(run(going_on, Agent(engine, tmp_path / "other.json")))
        assert [(r.prompt, r.answer) for r in alone] == [(r.prompt, r.answer) for r in records]
        agent.report(records, str(model), options, tmp_path, few=True)


def test_the_command_says_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Here:
        """In the place of another process."""

        def __init__(self, settings: dict[str, Any]) -> None:
            self.engine = Engine(settings["model"], **settings["engine"])
            self.agent = Agent(self.engine, Path(settings["file"]))

        def do(self, act: Any) -> ActResult | None:
            return self.agent.do(act)

        def close(self) -> None:
            self.engine.close()

    monkeypatch.setattr(agent, "Process", Here)
    model = write_tiny(tmp_path / "model", "llama", max_position_embeddings=4096)
    arguments = ["agent", str(model), "--turns", "3", "--longest", "60", "--block-size", "8", "--kv-memory", "4MB"]
    monkeypatch.setattr(sys, "argv", arguments)
    agent.main()
    said = capsys.readouterr().out
    assert (
        "computed over new: 1.0" in said
        and "(blocks of 8 tokens)" in said
        and "the same tokens as without any cache: 11 of 11" in said
    )
