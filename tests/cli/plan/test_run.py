"""What a run takes at most, on the page and as JSON: its parts make the whole, and they are the engine's."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx import Engine
from cortexmlx.bench.measure.random_model import write_random_model
from cortexmlx.bench.studies.layer_kinds import COMMON, KINDS
from cortexmlx.cli.start import run
from cortexmlx.core.config import EngineConfig
from cortexmlx.core.core import EngineCore
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.text import StopConditions
from cortexmlx.kv.sizing import ArenaDemand
from cortexmlx.kv.spec import paged_groups
from cortexmlx.types.request import QueuedRequest, RequestId
from cortexmlx.types.sampling_params import SamplingParams
from cortexmlx.vision import sight, towers
from support.engine.core_driver import Driver
from support.models.sighted import picture, shown, write_sighted
from support.models.tiny import tokens_of, write_tiny


def runs_of(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    assert run(["plan", str(folder), "--json", *options]) == 0
    runs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    return runs


@pytest.mark.parametrize("name", ["windowed llama", "lfm2"])
def test_what_stays_in_a_run_is_what_the_engine_has(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny(tmp_path / "model", name)
    options = ["--kv-memory", "1MB", "--max-rows", "3", "--block-size", "16", "--prefill-budget", "64"]
    (planned,) = runs_of(folder, capsys, "--context", "200", *options)
    driver = Driver(folder, max_rows=3, block_size=16, prefill_budget=64)
    way = driver.core.model._mode
    blocks = way.count_blocks(10**6, ArenaDemand(3, 64, 16), 512)
    bytes_per_block = [16 * group.bytes_per_token for group in paged_groups(way.groups)]
    assert planned["arena_bytes"] == sum((n + 2) * size for n, size in zip(blocks, bytes_per_block, strict=True))
    assert planned["weight_bytes"] == driver.core.loaded.weight_bytes
    assert (planned["states_bytes"] > 0) == (name == "lfm2") and planned["verify_bytes"] > 0
    assert planned["rows"] == 3
    comes_and_goes = max(
        *(planned[part] for part in ("prefill_bytes", "verify_bytes", "growth_bytes")),
        planned["tail_bytes"] + planned["decode_bytes"],
    )
    stays = sum(planned[part] for part in ("weight_bytes", "arena_bytes", "states_bytes", "snapshot_bytes"))
    assert planned["peak_bytes"] == stays + comes_and_goes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["windows", "latent", "hybrid", "recurrent"])
def test_a_run_of_a_kind_of_layers_takes_no_more_than_was_planned(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice as many texts as rows, so that the arena grows to its limit."""
    folder = write_random_model(tmp_path, {**COMMON, **KINDS[kind]})
    options = ["--max-rows", "4", "--block-size", "32", "--prefill-budget", "128"]
    (planned,) = runs_of(folder, capsys, "--context", "300", "--kv-memory", "12MB", *options)
    gc.collect()
    mx.clear_cache()
    there = mx.get_active_memory()
    core = EngineCore(EngineConfig(str(folder), kv_memory="12MB", max_rows=4, prefill_budget=128, token_target=None))
    mx.reset_peak_memory()
    handles = [RequestHandle(RequestId(seed), core.cancel) for seed in range(8)]
    for seed, handle in enumerate(handles):
        answer = 21 + 12 * (seed % 4)
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        core.add(QueuedRequest(tuple(tokens_of(300 - answer, seed=seed)), params), handle, StopConditions())
    while not core.idle:
        core.step()
    assert [len(handle.result(0).token_ids) for handle in handles] == 2 * [21, 33, 45, 57]
    assert mx.get_peak_memory() - there <= planned["peak_bytes"] * 1.02 + (8 << 20)


def test_as_many_rows_run_as_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path / "model", "llama")
    per_token = 2 * 2 * 2 * 8 * 4
    options = ["--kv-memory", str(40 * 32 * per_token), "--max-rows", "6"]
    lengths = [option for n in (100, 400, 500, 1300) for option in ("--context", str(n))]
    assert [entry["rows"] for entry in runs_of(folder, capsys, *options, *lengths)] == [6, 3, 2], "and none of 1,300"


def test_the_page_says_what_a_run_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path / "model", "llama")
    assert run(["plan", str(folder)]) == 0
    assert "at once, with all" not in capsys.readouterr().out, "no length, no run"
    assert run(["plan", str(folder), "--context", "300", "--max-rows", "2"]) == 0
    page = capsys.readouterr().out
    assert "\n2 x 300 tokens at once, with all of the cache in use\n  weights " in page
    assert max(map(len, page.splitlines())) <= 80
    for part in ("arena", "prefill step", "decode step", "peak"):
        assert f"\n  {part} " in page


@pytest.mark.parametrize("options", [["--prefill-budget", "1"], ["--max-rows", "1"]])
def test_sequences_as_short_as_can_be_have_figures(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny(tmp_path / "model", "llama")
    one, five = runs_of(folder, capsys, "--context", "1", "--context", "5", *options)
    assert one["tokens"] == 1 and 0 < one["peak_bytes"] < 1.01 * five["peak_bytes"]


def test_what_the_context_has_no_room_for_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ("--context", "513", "--context", "512")
    folder = write_tiny(tmp_path / "model", "llama")
    assert [entry["tokens"] for entry in runs_of(folder, capsys, *lengths)] == [512]
    assert run(["plan", str(folder), *lengths]) == 0
    page = capsys.readouterr().out
    assert page.count("longer than the model's context") == page.count("tokens at once, with all") == 1
    (kept,) = runs_of(folder, capsys, "--context", "5000", "--keep-last", "100")
    assert kept["tokens"] == 204 and kept["rows"] == 4, "rows of whole blocks, as many as the default is meant for"


@pytest.mark.usefixtures("unpaged")
def test_a_model_that_is_not_paged_has_no_such_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs_of(write_tiny(tmp_path / "model", "llama"), capsys, "--context", "300") == []


def test_a_run_with_images_takes_no_more_than_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest image, whose tower takes most of the memory; then others, whose features are not all kept."""
    pytest.importorskip("PIL")
    monkeypatch.setattr(towers, "MAX_PRODUCTS", 1 << 26)
    monkeypatch.setattr(sight, "FEATURE_BYTES", 1 << 16)
    large = {"hidden_size": 128, "intermediate_size": 1536, "depth": 2}
    folder = write_sighted(tmp_path / "model", "qwen3_vl", vision=large, most_pixels=64 * 144)
    options = ["--max-rows", "2", "--kv-memory", "1MB"]
    (planned,) = runs_of(folder, capsys, "--context", "500", *options)
    (blind,) = runs_of(write_tiny(tmp_path / "blind", "qwen3"), capsys, "--context", "500", *options)
    assert blind["image_bytes"] == 0
    gc.collect()
    mx.clear_cache()
    there = mx.get_active_memory()
    with Engine(folder, kv_memory="1MB", max_rows=2, speculate=False) as engine:
        bytes_of = engine.inspect(lambda core: core.model._sight_bytes)
        assert bytes_of == planned["image_bytes"] > planned["peak_bytes"] / 2
        mx.reset_peak_memory()
        prompts = [[shown("what?", picture(400, 400, seed))] for seed in range(3)]
        asked = [engine.submit(prompt, max_tokens=20, ignore_eos=True) for prompt in ("a text", *prompts)]
        assert all(len(each.result().token_ids) == 20 for each in asked)
        peak = mx.get_peak_memory() - there
    print(peak, planned)
    assert 0.5 * planned["peak_bytes"] < peak <= planned["peak_bytes"] * 1.02
