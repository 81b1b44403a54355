"""The table of docs/memory-sizes.md is what `cortexmlx plan` says of these models' configurations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cortexmlx.cli.start import run
from support.pages import read

QWEN3 = {
    "Qwen3 0.6B": (1024, 3072, 28, 16),
    "Qwen3 1.7B": (2048, 6144, 28, 16),
    "Qwen3 4B": (2560, 9728, 36, 32),
    "Qwen3 8B": (4096, 12288, 36, 32),
    "Qwen3 14B": (5120, 17408, 40, 40),
    "Qwen3 32B": (5120, 25600, 64, 64),
}
"""Of the published configurations: hidden size, size of the feed-forward layers, layers, query heads."""

MACS = ("8GB", "16GB", "24GB", "32GB", "64GB")


def configuration(name: str) -> dict[str, object]:
    """A config.json as mlx-community's 4-bit models have it."""
    hidden, feed_forward, layers, heads = QWEN3[name]
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": hidden < 4096,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
        "quantization": {"group_size": 64, "bits": 4},
    }


ROWS = {
    cells[0]: cells[1:]
    for cells in (
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in re.findall(r"^\| Qwen3.*$", read("docs/memory-sizes.md"), re.MULTILINE)
    )
}


def test_every_model_has_its_row() -> None:
    assert ROWS.keys() == QWEN3.keys()


@pytest.mark.parametrize("name", QWEN3)
def test_a_row_is_what_plan_says(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For two of the Macs, others for each model."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(configuration(name)))
    first = list(QWEN3).index(name) % len(MACS)
    for mac in (first, (first + 2) % len(MACS)):
        assert run(["plan", str(config), "--memory", MACS[mac], "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        model, fits = plan["model"], plan["here"]["fits"]
        assert ROWS[name][:3] == [
            f"{model['parameters'] / 1e9:.2f} B",
            f"{model['weight_bytes'] / 2**30:.2f} GiB",
            f"{model['kv_bytes_per_token'] // 1024} KiB",
        ]
        assert ROWS[name][3 + mac] == (f"{fits:,}" if fits else "–")
