"""`cortexmlx plan --memory`: what fits on a Mac that is not here, by arithmetic of its own for three kinds of model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.cli.start import run
from support.models.published import LFM2_1B, QWEN3_8B, QWEN3_30B_A3B

GIB = 1 << 30
ROWS, BLOCK, TAIL = 16, 32, 16
"""What an engine has by default: rows, tokens of a block, and of a row's tail."""


def plan(config: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    (folder / "it.json").write_text(json.dumps(config))
    assert run(["plan", str(folder / "it.json"), "--json", *options]) == 0
    here: dict[str, Any] = json.loads(capsys.readouterr().out)["here"]
    return here


def dense() -> tuple[dict[str, Any], int, int, int, int]:
    """Qwen3-8B in bfloat16, two matrices of its vocabulary: weights, bytes of a token, of a row's state, logits."""
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288 + 2 * 128 + 2 * 4096
    weights = 36 * layer + 2 * 151_936 * 4096 + 4096
    assert weights == 8_190_735_360, "as published"
    return QWEN3_8B, 2 * weights, 2 * 36 * 8 * (128 + 128), 0, 151_936


def experts() -> tuple[dict[str, Any], int, int, int, int]:
    """Qwen3-30B-A3B with its matrices in 4 bits: for each 64 numbers of a matrix also a scale and a bias of 2 bytes."""
    attention, router = 2048 * (4096 + 2 * 512) + 4096 * 2048, 2048 * 128
    matrices = 48 * (attention + router + 128 * 3 * 2048 * 768) + 2 * 151_936 * 2048
    norms = 48 * (2 * 128 + 2 * 2048) + 2048
    assert matrices + norms == 30_532_122_624, "as published"
    config = {**QWEN3_30B_A3B, "quantization": {"group_size": 64, "bits": 4}}
    return config, matrices * 4 // 8 + matrices // 64 * 4 + 2 * norms, 2 * 48 * 4 * (128 + 128), 0, 151_936


def hybrid() -> tuple[dict[str, Any], int, int, int, int]:
    """LFM2-1.2B: ten convolutions that look two tokens back, six layers of attention. Its 12,288 become 8,192."""
    convolution = 2048 * 3 * 2048 + 3 * 2048 + 2048 * 2048
    attention = 2 * 2048 * 2048 + 2 * 2048 * 512 + 2 * 64
    layers = 10 * convolution + 6 * attention + 16 * (3 * 2048 * 8192 + 2 * 2048)
    weights = layers + 65_536 * 2048 + 2048
    assert weights == 1_170_340_608, "as published"
    return LFM2_1B, 2 * weights, 2 * 6 * 8 * (64 + 64), 2 * 10 * 2 * 2048, 65_536


@pytest.mark.parametrize(
    ("model", "memory", "for_models"),
    [(dense, "64GB", 48 * GIB), (experts, "24GB", 16 * GIB), (hybrid, "24GB", 16 * GIB)],
)
def test_what_is_left_of_a_mac_is_its_share_less_what_is_there(
    model: Any, memory: str, for_models: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, weights, token, state, vocabulary = model()
    here = plan(config, tmp_path, capsys, "--memory", memory, "--context", "5000")
    left = for_models - weights - 2 * ROWS * (TAIL * token + state) - 4 * ROWS * vocabulary
    assert here["assumed"] and here["working_set_bytes"] == for_models
    assert here["weight_bytes"] == weights and here["kv_bytes_per_token"] == token
    assert here["free_bytes"] == max(left, 0)
    row = -(-5000 // BLOCK) * BLOCK * token + state
    assert here["lengths"] == [{"tokens": 5000, "bytes": row, "sequences": max(left, 0) // row}]
    assert (left < 0) == (model is experts), "30 B parameters in 4 bits are 16 GiB"


def test_the_page_names_the_mac_and_not_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "it.json").write_text(json.dumps(QWEN3_8B))
    line = ["plan", str(tmp_path / "it.json"), "--memory", "64GB"]
    assert run([*line, "--kv-memory", "40GB", "--context", "4096"]) == 0
    page = capsys.readouterr().out
    assert "\nOn a Mac with 64 GiB: 48 GiB of it for models, as macOS gives its GPU at least\n" in page
    assert "this machine" not in page and "beside the weights such a Mac has 32.7 GiB" in " ".join(page.split())
    assert max(map(len, page.splitlines())) <= 80
    assert run([*line, "--kv-memory", "70GB"]) == 1
    assert "is more than such a Mac has: 64 GiB, 48 GiB of it for models" in capsys.readouterr().err


def test_a_memory_without_its_unit_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "it.json", "--memory", "64"]) == 2
    assert "'64' is no Mac's memory: write it like 64GB" in " ".join(capsys.readouterr().err.replace("│", " ").split())
