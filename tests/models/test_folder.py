"""Folders in the hub's layout: loaded as mlx-lm loads them, and every kind of damage reported in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from cortexmlx.models import load_model
from support.folders import CONFIG, fails, write_folder

pytestmark = pytest.mark.usefixtures("a_linux_cpu")

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


def test_its_identity_is_its_content_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "m")
    known = [load_model(folder).identity]
    assert load_model(folder.rename(tmp_path / "n")).identity == known[0]
    monkeypatch.setattr("cortexmlx.models.loaded._WHOLE_FILE_BYTES", 1 << 16)
    for third in range(3):
        known.append(load_model(tmp_path / "n").identity)
        file = tmp_path / "n" / "model.safetensors"
        assert file.stat().st_size > 1 << 16, "it is looked at in pieces"
        data = bytearray(file.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        size = (len(data) - begin) // 3
        for place in range(begin + third * size // 4 * 4, begin + (third + 1) * size, 4):
            data[place] ^= 1
        file.write_bytes(data)
    known.append(load_model(tmp_path / "n").identity)
    (tmp_path / "n" / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 20000.0}))
    known.append(load_model(tmp_path / "n").identity)
    assert len(set(known[1:])) == 5 and known[0] != known[1], known


def test_the_loaded_folder_says_what_it_is(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    loaded = load_model(str(folder))
    assert (loaded.name, loaded.path, loaded.context_length) == (str(folder), folder, 1024)
    assert loaded.weight_bytes == loaded.parameters * 4 and loaded.notes == ()
    assert loaded.config["hidden_size"] == 64
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Hello")) == "Hello"


def test_an_empty_folder_holds_no_model(tmp_path: Path) -> None:
    fails(tmp_path, ModelNotFound, "no config.json")


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    fails(tmp_path, ModelNotFound, "an adapter, not a model", "--adapter")


def test_a_folder_of_gguf_files_names_one(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    fails(tmp_path, ModelNotFound, "a.gguf")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    fails(folder, ModelCorrupt, "no weights", "model*.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    fails(folder, ModelUnsupported, ".bin", "mlx_lm.convert")


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


def test_an_architecture_that_wants_another_package_says_so_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "olmo"}))
    fails(folder, ModelUnsupported, "'olmo'", "install ai2-olmo")
    assert capsys.readouterr() == ("", ""), "mlx-lm prints it"


def test_codes_of_floats_are_not_taken_for_numbers(tmp_path: Path) -> None:
    """MLX reads 8-bit floats as bytes, and mlx-lm says nothing where a matrix of them fits."""
    import mlx.core as mx

    folder = write_folder(tmp_path / "m")
    file = str(folder / "model.safetensors")
    weights: Any = dict(mx.load(file))
    name = "model.layers.0.mlp.up_proj.weight"
    mx.save_safetensors(file, weights | {name: mx.to_fp8(weights[name])})
    fails(folder, ModelUnsupported, "model.layers.0.mlp.up_proj.weight as uint8", "mlx_lm.convert")


def test_weights_under_another_name_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    fails(folder, ModelUnsupported, "consolidated.safetensors", "model*.safetensors")


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
    from support.models.sentencepieces import judge, trained

    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false, "tokenizer_class": "GPT2Tokenizer"}')
    (folder / "tokenizer.model").write_bytes(trained("llama"))
    tokenizer = load_model(folder).tokenizer
    text = "  two  spaces and 世界 🙂"
    assert tokenizer.encode(text) == judge("llama").encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert {7, judge("llama").eos_id()} == tokenizer.eos_token_ids
