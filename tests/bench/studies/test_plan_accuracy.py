"""The bench that holds plan's figures against what runs take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cortexmlx.bench.studies import layer_kinds, plan_accuracy
from cortexmlx.bench.studies.plan_accuracy import CONSTANT, SETTINGS, STARTER, PlanOutcome, RunSetting, outcome_table

PARTS = dict.fromkeys(
    ("weight_bytes", "arena_bytes", "states_bytes", "snapshot_bytes", "tail_bytes", "prefill_bytes", "decode_bytes"),
    10**6,
)
OUTCOME = PlanOutcome("it", 10**9, 1_001 * 10**6, PARTS, 2 * 10**9, 3.0)


def test_a_promise_is_kept_within_two_percent_and_the_constant() -> None:
    edge = int(0.02 * OUTCOME.planned) + CONSTANT
    assert replace(OUTCOME, peak=OUTCOME.planned + edge).is_within_plan
    assert not replace(OUTCOME, peak=OUTCOME.planned + edge + 1).is_within_plan


def test_the_table_has_every_part_and_says_which_promise_was_broken() -> None:
    head, _, kept, broken = outcome_table([OUTCOME, replace(OUTCOME, peak=2 * 10**9)]).splitlines()
    assert head.count("|") == kept.count("|") == broken.count("|")
    assert "| 1000.0 | 1001.0 | +0.10 % |" in kept and "too far" not in kept
    assert "+100.00 % **too far**" in broken


def test_the_settings_are_of_all_kinds_and_differ_in_everything() -> None:
    assert {s.kind for s in SETTINGS} == {STARTER, *layer_kinds.KINDS}
    for name in ("kv_memory", "max_rows", "tokens", "block_size", "prefill_budget"):
        assert len({getattr(setting, name) for setting in SETTINGS}) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.kind != STARTER], ids=lambda s: s.name)
def test_a_run_takes_what_was_planned(setting: RunSetting) -> None:
    outcome = plan_accuracy._measure_in_process(SETTINGS.index(setting))
    assert outcome.is_within_plan, outcome_table([outcome])


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.kind == STARTER], ids=lambda s: s.name)
def test_a_run_of_the_starter_model_takes_what_was_planned(setting: RunSetting) -> None:
    outcome = plan_accuracy._measure_in_process(SETTINGS.index(setting))
    assert outcome.is_within_plan, outcome_table([outcome])
