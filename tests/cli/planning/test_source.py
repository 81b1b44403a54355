"""From what a person names to a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cortexmlx.cli.planning.source import PlanSource, find_source
from cortexmlx.cli.start import run
from cortexmlx.models import load_model
from support.folders import write_zeros
from support.gguf.export import export
from support.gguf.export import tiny as gguf_models
from support.gguf.models import write_model
from support.models.published import QWEN3_8B


def test_of_a_hub_id_only_the_configuration_is_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from cortexmlx.models import hub as fetch

    def download(repo: str, files: list[str]) -> Path:
        assert (repo, files) == ("org/Qwen3-8B", ["config.json"])
        (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
        return tmp_path

    monkeypatch.setattr(fetch, "cached_folder", lambda repo: None)
    monkeypatch.setattr(fetch, "_download_snapshot", download)
    assert run(["plan", "org/Qwen3-8B"]) == 0
    assert "  weights         15.3 GiB    as stored\n  KV per token    144 KiB " in capsys.readouterr().out


def test_a_folder_and_its_config_are_named_alike_with_the_bytes_of_the_weights(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    alone = find_source(str(folder))
    assert alone == find_source(str(folder / "config.json")) == PlanSource("Qwen3-8B", QWEN3_8B, None)
    write_zeros(folder / "model.safetensors", 1100)
    write_zeros(folder / "other.safetensors", 700)
    assert find_source(str(folder)).weight_bytes == find_source(str(folder / "config.json")).weight_bytes == 1100
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    damaged = find_source(str(folder))
    assert damaged.weight_bytes is None and "has 1099 of 1100 bytes" in damaged.notes[0]
    (tmp_path / "mine.json").write_text(json.dumps(QWEN3_8B))
    assert find_source(str(tmp_path / "mine.json")).name == "mine"


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("llama", "Q4_K"),
        ("llama", "Q6_K"),
        ("gemma3", "Q8_0"),
        ("gpt-oss", "MXFP4"),
    ],
)
def test_a_gguf_file_is_as_large_as_it_becomes_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, types: str
) -> None:
    monkeypatch.setattr("cortexmlx.models.load._is_float32_faster", lambda: False)
    export(tmp_path / "tiny.gguf", gguf_models(256)[name], types)
    assert find_source(str(tmp_path / "tiny.gguf")).weight_bytes == load_model(tmp_path / "tiny.gguf").weight_bytes


def test_a_gguf_file_is_quantized_as_its_tensors_are(tmp_path: Path) -> None:
    source = find_source(str(write_model(tmp_path / "tiny.gguf", type_name="Q4_0")))
    assert source.config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    assert (source.config["hidden_size"], source.config["dtype"]) == (64, "float16")
    assert "quantization" not in find_source(str(write_model(tmp_path / "plain.gguf", type_name="F16"))).config
