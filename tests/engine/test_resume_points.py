"""What a request of an agent computes again: its new tokens, what the template changed, and two blocks at most."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest

from support.agents.agent import BLOCK, KINDS, agent_of, driver_of, model_of, recorded, tool
from support.agents.templates import GLM, GPT_OSS, MISTRAL, QWEN3, TEMPLATES, Template

FEW = [("window", QWEN3), ("window", GPT_OSS), ("hybrid", GPT_OSS)]
"""Those that need the most care."""
CASES = [*product(KINDS, TEMPLATES)] if "TRIALS" in os.environ else FEW


@pytest.mark.parametrize("kind", ["hybrid", pytest.param("window", marks=pytest.mark.slow)])
def test_a_loop_of_calls_and_a_foreign_prompt_cost_a_conversation_nothing(kind: str, tmp_path: Path) -> None:
    driver = driver_of(model_of(kind, tmp_path), tokens=1300, snapshots=6, max_rows=1, prefill_budget=256)
    agent = agent_of(driver, GLM, 250)
    assert max(counted.again for counted in recorded(agent, 2, 8, 500)) <= 2 * BLOCK
    driver.core.check_invariants()


def test_tools_that_move_with_each_question_cost_what_comes_after_them(tmp_path: Path) -> None:
    agent = agent_of(driver_of(model_of("hybrid", tmp_path)), MISTRAL, 130)
    agent.turn(0)
    agent.turn(4, 2)
    agent.turn(1)
    agent.turn(0)
    assert max(counted.again for counted in agent.counts) <= 2 * BLOCK


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "template"), CASES, ids=lambda value: getattr(value, "name", value))
def test_twenty_turns_compute_what_is_new(kind: str, template: Template, tmp_path: Path) -> None:
    driver = driver_of(model_of(kind, tmp_path))
    counts = list(recorded(agent_of(driver, template, 2500), 20, 60, 3000))
    assert [counted for counted in counts if counted.again > 2 * BLOCK] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_more_tool_computes_at_most_four_times_what_comes_after_it(kind: str, tmp_path: Path) -> None:
    driver = driver_of(model_of(kind, tmp_path))
    agent = agent_of(driver, QWEN3, 5000)
    agent.turn(0)
    agent.tools.append(tool(agent.words(8), 99))
    agent.turn(0)
    assert agent.counts[-1].again <= 3 * (agent.counts[-1].changed + 4 * 256)
