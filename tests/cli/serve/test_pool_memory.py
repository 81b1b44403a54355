"""The memory that models get: together if they fit, in turns otherwise. The engines judge what is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine
from cortexmlx.cli.serve.pool import PlannedModel, plan_memory
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import CortexError, InvalidRequest
from support.models.sighted import write_sighted
from support.models.tiny import write_tiny

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny", max_position_embeddings=65536)


def planned(folder: Path, names: str, budget: int, keep: str = "", **options: Any) -> dict[str, PlannedModel]:
    return plan_memory({name: EngineConfig(folder, max_rows=4, **options) for name in names}, budget, keep)


def test_models_that_fit_together_share(folder: Path) -> None:
    budget = 100 * MIB
    both = planned(folder, "ab", budget)
    assert sum(each.memory for each in both.values()) <= budget and both["a"].kv == both["b"].kv
    alone = planned(folder, "a", budget)["a"]
    assert alone.kv >= both["a"].kv and both["a"].context_length >= 32 * 1024


def test_models_that_do_not_fit_together_take_turns(folder: Path) -> None:
    alone = planned(folder, "a", 16 * MIB)["a"]
    both = planned(folder, "ab", 16 * MIB)
    assert both["a"].memory == alone.memory <= 16 * MIB < sum(each.memory for each in both.values())


def test_kept_models_leave_the_others_the_rest(folder: Path) -> None:
    three = planned(folder, "abc", 20 * MIB, keep="b")
    assert three["b"].memory + three["a"].memory <= 20 * MIB and list(three) == ["a", "b", "c"]


def test_a_draft_model_is_planned_as_the_engine_opens_it(folder: Path) -> None:
    alone, plan = planned(folder, "a", 12 * MIB)["a"], planned(folder, "a", 12 * MIB, draft=folder)["a"]
    assert plan.memory <= 12 * MIB and plan.fixed == 2 * alone.fixed and plan.kv <= alone.kv
    assert plan.context_length < alone.context_length
    with Engine(**vars(plan.config)) as engine:
        assert engine.longest_request == plan.context_length
        limits = engine.inspect(lambda core: (core.cache.bytes_limit, core.draft.rows.cache.bytes_limit))
    assert limits[0] == limits[1] and sum(limits) <= plan.kv


def test_what_images_take_is_planned(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    folder = write_sighted(tmp_path / "sees", "qwen3_vl")
    plan = planned(folder, "a", 100 * MIB)["a"]
    with Engine(**vars(plan.config)) as engine:
        taken_by_images = engine.inspect(lambda core: core.model._sight_bytes)
        assert taken_by_images > 0 and plan.fixed >= engine.info.weight_bytes + taken_by_images


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("windowed llama", {"kv_memory": "1MB"}),
        ("gpt_oss", {"keep_last": 100}),
        ("gemma3_text", {"kv_memory": "2MB", "block_size": 64}),
    ],
)
def test_the_engine_has_the_context_that_is_advertised(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    folder = write_tiny(tmp_path / "tiny", name, max_position_embeddings=65536)
    plan = planned(folder, "a", 12 * MIB, **options)["a"]
    with Engine(**vars(plan.config)) as engine:
        assert engine.longest_request == plan.context_length
        assert engine.stats().kv_bytes_limit <= plan.kv
        if name != "gemma3_text":  # whose tiny files hold an output projection that the configuration does not state
            assert engine.info.weight_bytes < plan.fixed
        again = planned(folder, "a", 12 * MIB, **options)["a"]
        assert again == plan


@pytest.mark.parametrize(
    ("budget", "options", "says"),
    [
        (1, {}, "for weights and steps, and 1 B are left for it"),
        (10 * MIB, {"kv_memory": "20MB"}, "19.1 MiB for keys and values, but 10 MiB are left for it"),
        (20 * MIB, {"kv_memory": "100"}, "hold no block of keys and values"),
    ],
)
def test_what_never_fits_is_refused_with_the_numbers(
    folder: Path, budget: int, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        planned(folder, "a", budget, **options)
    assert says in str(refused.value) and str(refused.value).startswith("a takes ")


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CortexError, match="missing"):
        planned(tmp_path / "missing", "a", 100 * MIB)
