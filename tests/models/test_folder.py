"""Folders in the hub's layout: loaded as mlx-lm loads them, and every kind of damage reported in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.errors import CortexError, ModelCorrupt, ModelNotFound, ModelUnsupported
from cortexmlx.models import load_model
from support.folders import CONFIG, write_folder


@pytest.fixture(autouse=True)
def a_linux_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded here becomes float32, as on a Linux CPU, wherever the tests run."""
    import mlx.core as mx

    monkeypatch.setattr("cortexmlx.models.load._slow_below_float32", lambda: True)
    mx.set_default_device(mx.cpu)


TOKENS = [5, 250, 17, 99, 3, 140]


def logits(model: Any) -> np.ndarray:
    import mlx.core as mx

    return np.array(model(mx.array([TOKENS])).astype(mx.float32))[0]


@pytest.mark.parametrize("quantize", [False, True])
def test_a_folder_computes_what_mlx_lm_computes(tmp_path: Path, quantize: bool) -> None:
    from mlx_lm import load

    folder = write_folder(tmp_path / "m", quantize)
    wanted, _ = load(str(folder))
    assert np.array_equal(logits(load_model(folder, dequantize=False).model), logits(wanted))
    widened = load_model(folder)
    assert widened.dtype == "float32" and not hasattr(widened.model.layers[0].mlp.up_proj, "scales")
    assert np.abs(logits(widened.model) - logits(wanted)).max() < 1e-4


def test_the_loaded_folder_says_what_it_is(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    loaded = load_model(str(folder))
    assert (loaded.name, loaded.path, loaded.context_length) == (str(folder), folder, 1024)
    assert loaded.weight_bytes == loaded.parameters * 4 and loaded.notes == ()
    assert loaded.config["hidden_size"] == 64
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Hello")) == "Hello"


def test_all_end_tokens_are_collected(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [11, 12]}')
    assert set(load_model(folder).tokenizer.eos_token_ids) == {7, 11, 12, 256}


def test_half_precision_becomes_float32_on_a_cpu_even_when_weights_may_not_grow(tmp_path: Path) -> None:
    loaded = load_model(write_folder(tmp_path / "m", quantize=True, dtype="float16"), dequantize=False)
    assert loaded.dtype == "float32"
    assert hasattr(loaded.model.layers[0].mlp.up_proj, "scales")
    assert any("quantized" in note for note in loaded.notes)


def test_loading_reports_progress(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    load_model(write_folder(tmp_path / "m"), on_progress=lambda what, fraction: seen.append((what, fraction)))
    fractions = [fraction for _, fraction in seen]
    assert fractions == sorted(fractions) and fractions[0] == 0.0 and fractions[-1] == 1.0


def test_a_context_length_that_is_not_stated_is_assumed_and_said(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    config = {key: value for key, value in CONFIG.items() if key != "max_position_embeddings"}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_model(folder)
    assert loaded.context_length == 2048
    assert any("2048" in note for note in loaded.notes)


def fails(folder: Path, error: type[CortexError], *words: str) -> None:
    with pytest.raises(error) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_an_empty_folder_holds_no_model(tmp_path: Path) -> None:
    fails(tmp_path, ModelNotFound, "no config.json")


def test_a_folder_of_gguf_files_names_one(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    fails(tmp_path, ModelNotFound, "a.gguf")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    fails(folder, ModelCorrupt, "no weights", "model*.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    fails(folder, ModelUnsupported, ".bin", "mlx_lm.convert")


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
def test_truncated_weights_are_reported_with_the_bytes(tmp_path: Path, kept: int) -> None:
    folder = write_folder(tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:kept])
    fails(folder, ModelCorrupt, "model.safetensors", "Download it again")


def test_a_damaged_weights_header(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:20] = b"\xff" * 12
    file.write_bytes(content)
    fails(folder, ModelCorrupt, "header cannot be read")


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    fails(folder, ModelCorrupt, "git lfs pull")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fails(folder, ModelCorrupt, "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}'])
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(content)
    fails(folder, ModelCorrupt, "model.safetensors.index.json")


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00", '{"hidden_size": 3}', '{"model_type": 4}'])
def test_a_broken_config(tmp_path: Path, content: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_text(content)
    fails(folder, ModelCorrupt, "config.json")


def test_a_config_that_lacks_a_setting(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "hidden_size"}))
    fails(folder, ModelCorrupt, "config.json", "hidden_size")


def test_weights_that_do_not_fit_the_config(tmp_path: Path) -> None:
    fails(write_folder(tmp_path / "m", intermediate_size=128), ModelCorrupt, "do not fit")
    fails(write_folder(tmp_path / "n", num_hidden_layers=3), ModelCorrupt, "do not fit")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    fails(write_folder(tmp_path / "m", model_type="made_up_9"), ModelUnsupported, "'made_up_9'", "mlx-lm")


def test_code_of_its_own_is_not_run(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", model_file="evil.py")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    fails(folder, ModelUnsupported, "evil.py")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": 3}'])
def test_a_broken_tokenizer(tmp_path: Path, content: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.json").write_text(content)
    fails(folder, ModelCorrupt, "tokenizer")


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    fails(folder, ModelCorrupt, "tokenizer")


def test_a_folder_with_only_a_sentencepiece_model_is_tokenized_by_sentencepiece(tmp_path: Path) -> None:
    from support.sentencepieces import judge, trained

    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false, "tokenizer_class": "GPT2Tokenizer"}')
    (folder / "tokenizer.model").write_bytes(trained("llama"))
    tokenizer = load_model(folder).tokenizer
    text = "  two  spaces and 世界 🙂"
    assert tokenizer.encode(text) == judge("llama").encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert {7, judge("llama").eos_id()} == tokenizer.eos_token_ids
