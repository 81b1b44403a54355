"""What the largest steps of a run take, beside what the engine takes for them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from cortexmlx.attention.backends import choose_backend
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.text import StopConditions
from cortexmlx.execution import largest_steps as module
from cortexmlx.execution.execution_modes import choose_execution_mode
from cortexmlx.execution.largest_steps import StepBytes, plan_largest_steps, plan_lone_step, predict_step_bytes
from cortexmlx.kv.sizing import ArenaDemand
from cortexmlx.kv.spec import TAIL_COLUMNS, KVSpec, LayerGroup
from cortexmlx.models import load_model
from cortexmlx.models.adapters.low_rank import read_low_rank_adapter
from cortexmlx.scheduling.plan import StepKind
from cortexmlx.speculation.speculation import MAX_STEP_DRAFTS
from cortexmlx.types.embeddings import PoolingSpec
from cortexmlx.types.request import QueuedRequest
from cortexmlx.types.sampling_params import SamplingParams
from support.engine.core_driver import Driver
from support.models.adapters import write_adapter
from support.models.tiny import tokens_of, write_tiny

GROUPS = (LayerGroup(KVSpec(2, 4, 4, "float32"), (0,)), LayerGroup(KVSpec(1, 4, 4, "float32", window=40), (1, 2)))


@pytest.mark.parametrize(("rows", "piece", "tokens"), [(1, 32, 200), (4, 32, 200), (16, 20, 90), (2, 24, 60)])
def test_the_largest_steps_are_the_last_piece_beside_decoding_rows_and_a_window(
    rows: int, piece: int, tokens: int
) -> None:
    prefill, decode = plan_largest_steps(GROUPS, ArenaDemand(rows, piece, 8), tokens)
    assert prefill.kind is StepKind.MIXED and decode.kind is StepKind.DECODE
    *single, last = prefill.segments
    assert len(single) == rows - 1 and all(s.count == 1 for s in single)
    assert last.count == max(piece - rows + 1, min(16, piece))
    assert last.first + last.count == tokens - rows - TAIL_COLUMNS - 1, "the end of the prompt"
    assert len(decode.segments) == rows and decode.column == 0
    assert max(s.first for s in decode.segments) + TAIL_COLUMNS <= tokens


@pytest.mark.parametrize(("rows", "piece", "tokens", "together"), [(3, 512, 200, 3), (8, 256, 125, 3), (2, 8, 3, 2)])
def test_short_prompts_are_computed_together(rows: int, piece: int, tokens: int, together: int) -> None:
    prefill, decode = plan_largest_steps(GROUPS, ArenaDemand(rows, piece, 8), tokens)
    prompt = max(1, tokens - rows - TAIL_COLUMNS - 1)
    pieces = prefill.segments[rows - together :]
    assert sum(s.count for s in pieces) == min(max(min(16, piece), piece - (rows - together)), together * prompt)
    assert len(decode.segments) == rows


@pytest.mark.parametrize(("tokens", "piece", "end"), [(200, 200, 200), (3000, 2048, 3000), (100_000, 2048, 8192)])
def test_the_largest_step_without_a_decoding_row_is_where_scores_are_most(tokens: int, piece: int, end: int) -> None:
    [segment] = plan_lone_step(GROUPS, ArenaDemand(16, 512, 8, 2048), tokens).segments
    assert (segment.count, segment.first + segment.count) == (piece, end)


def test_a_larger_lone_piece_is_in_the_prediction(wide: Path) -> None:
    model = load_model(str(wide)).model
    usual, lone = (bytes_of(model, ArenaDemand(2, 32, 8, budget), 300) for budget in (0, 256))
    assert lone.prefill > usual.prefill and (lone.verify, lone.decode) == (usual.verify, usual.decode)
    assert lone.prefill == bytes_of(model, ArenaDemand(1, 256, 8), 300 + TAIL_COLUMNS + 2).prefill


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose steps take more than the constant by far."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}
    folder = tmp_path_factory.mktemp("wide") / "wide"
    return write_tiny(folder, "llama", **shape, vocab_size=4096, max_position_embeddings=1 << 16)


def bytes_of(model: Any, load: ArenaDemand, tokens: int) -> StepBytes:
    way = choose_execution_mode(model)
    return predict_step_bytes(model, way.groups, choose_backend("auto").attend, 4096, load, tokens)


def test_the_engine_takes_for_a_step_what_is_planned(wide: Path) -> None:
    """A prompt of 1,000 tokens in pieces of 256, alone: its blocks are one run, whose keys need no copy."""
    gc.collect()  # of tests before
    mx.synchronize()
    there = mx.get_active_memory()
    driver = Driver(wide, tokens=1100, max_rows=1, prefill_budget=256, block_size=32, prefix_cache=False)
    loaded = driver.core.loaded
    planned = bytes_of(load_model(wide).model, ArenaDemand(1, 256, 32), 1000)
    driver.add(tokens_of(980), 20)
    mx.synchronize()
    mx.reset_peak_memory()
    driver.finish()
    took = mx.get_peak_memory() - there - 2 * loaded.weight_bytes - driver.core.runner.arena.nbytes
    del loaded
    copies = 2 * 1000 * driver.core.info.kv_bytes_per_token
    assert planned.prefill > 16 << 20
    assert planned.prefill - copies - (2 << 20) <= took <= planned.prefill + (2 << 20)


def test_planning_computes_nothing_and_leaves_the_model_as_it_was(wide: Path) -> None:
    model = load_model(wide).model
    before, used = dict(tree_flatten(model.parameters())), mx.get_active_memory()
    mx.reset_peak_memory()
    bytes_of(model, ArenaDemand(4, 512, 32), 4000)
    assert mx.get_peak_memory() - used < 16 << 20, "masks and tables are real"
    after = dict(tree_flatten(model.parameters()))
    assert {id(a) for a in before.values()} == {id(a) for a in after.values()}


def test_what_very_long_rows_take_is_reckoned_from_shorter_ones(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, load = load_model(wide).model, ArenaDemand(2, 128, 32)
    monkeypatch.setattr(module, "_TRACED_LENGTHS", (2048, 4096))
    reckoned = bytes_of(model, load, 6000)
    monkeypatch.setattr(module, "_TRACED_LENGTHS", (1024, 8192))
    traced = bytes_of(model, load, 6000)
    assert reckoned.prefill == pytest.approx(traced.prefill, rel=0.05)
    assert reckoned.decode == pytest.approx(traced.decode, rel=0.05)


@pytest.mark.parametrize("name", ["windowed llama", "deepseek_v3", "gpt_oss", "mamba2"])
def test_every_kind_can_be_traced_and_more_rows_take_more(name: str, tiny: Any) -> None:
    model = load_model(tiny(name)).model
    groups = choose_execution_mode(model).groups
    few, many = (
        predict_step_bytes(model, groups, choose_backend("auto").attend, 320, ArenaDemand(rows, 32, 8), 100)
        for rows in (1, 8)
    )
    assert 0 < few.decode < many.decode and few.prefill > 0


@pytest.mark.parametrize(
    ("rows", "tokens", "beside", "all_of_them"), [(1, 200, 1, 16), (4, 200, 49, 64), (9, 90, 71, 73)]
)
def test_rows_verify_as_many_drafts_as_may_be_drafted(rows: int, tokens: int, beside: int, all_of_them: int) -> None:
    mixed, verifying = plan_largest_steps(GROUPS, ArenaDemand(rows, 64, 8), tokens, MAX_STEP_DRAFTS)
    assert mixed.kind is verifying.kind is StepKind.MIXED
    assert (len(mixed.logit_rows), len(verifying.logit_rows)) == (beside, all_of_them)
    assert mixed.segments[-1].count >= 16, "a piece of the last prompt"


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits take most of a step."""
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 65536, "max_position_embeddings": 4096}
    return write_tiny(tmp_path_factory.mktemp("spoken") / "spoken", "llama", **shape)


@pytest.mark.parametrize(
    "asked",
    [
        "drafts",
        "a form",
        pytest.param("biases", marks=pytest.mark.slow),
        "an embedding",
        pytest.param("an adapter", marks=pytest.mark.slow),
    ],
)
def test_no_run_takes_more_than_is_planned_with_what_is_on_by_default(asked: str, spoken: Path, tmp_path: Path) -> None:
    """Four texts of 300 tokens on three rows, in pieces of 128, beside the largest steps that are planned."""
    model = load_model(spoken).model
    way, load = choose_execution_mode(model), ArenaDemand(3, 128, 16)
    planned = predict_step_bytes(model, way.groups, choose_backend("auto").attend, 65536, load, 300)
    del model
    gc.collect()
    more: dict[str, Any] = {"adapters": {}} if asked == "an adapter" else {}
    driver = Driver(spoken, tokens=1200, max_rows=3, prefill_budget=128, block_size=16, prefix_cache=False, **more)
    core = driver.core
    params: dict[str, Any] = {"logit_bias": {11: 1000.0}} if asked != "a form" else {}
    if asked == "a form":
        params = {"structured": {"type": "array", "items": {"type": "integer"}}, "ignore_eos": False}
    if asked == "an adapter":
        folder = write_adapter(tmp_path / "adapter", spoken)
        core.adapters.load("one", read_low_rank_adapter("one", folder, 64, 1 << 30), core.scheduler.jobs)
        params["adapter"] = "one"
    mx.synchronize()
    mx.clear_cache()
    there = mx.get_active_memory()
    mx.reset_peak_memory()
    if asked == "an embedding":
        for seed in range(4):
            _embed(driver, tokens_of(280, seed=seed))
    else:
        for seed in range(4):
            driver.add(tokens_of(230, seed=seed), 60, **params)
    for _ in range(2_000):
        if core.idle:
            break
        for job in core.scheduler.draftable_jobs:
            core.scheduler.set_drafts(job.id, [11] * 15)
        core.step()
    mx.synchronize()
    largest = max(planned.prefill, planned.verify, planned.decode)
    assert mx.get_peak_memory() - there <= largest * 1.02 + (8 << 20)


def _embed(driver: Driver, prompt: list[int]) -> None:
    """Queue a text whose states are averaged, as an embedding's are."""
    handle = RequestHandle(7_000 + len(driver.core.requests.by_id), driver.core.cancel)
    request = QueuedRequest(tuple(prompt), SamplingParams(max_tokens=1), 0, 0.0, pooling=PoolingSpec(0))
    driver.core.add(request, handle, StopConditions())
