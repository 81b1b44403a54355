"""The rows of `cortexmlx bench`: which there are, and what stands in them."""

from __future__ import annotations

import json

import pytest

from support.models.bench_model import bench


def test_rows_cover_every_combination(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    tests = "-p 24 -n 5 -b 1,2 -d 0 -d 16 --block-size 8 --block-size 16 -r 2 -o json"
    report = json.loads(bench(capsys, model, *tests.split()))
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
