"""What the JSON files of a folder say, and what no model means."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from cortexmlx.models import load_model
from cortexmlx.models.folder_config import (
    foreign_quantization,
    note_unread_inputs,
    read_config,
    read_recommended_sampling,
)
from support.folders import CONFIG, fails, write_folder

pytestmark = pytest.mark.usefixtures("a_linux_cpu")


def test_all_end_tokens_are_collected(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [11, 12]}')
    assert set(load_model(folder).tokenizer.eos_token_ids) == {7, 11, 12, 256}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rope_scaling": {"factor": [float("nan")]}}, "rope_scaling.factor is not a number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, but the weights are 20 tensors"),
        ({"text_config": {"n_layers": 21}}, "n_layers=21"),
        ({"hidden_size": 10**12}, "1000000000000"),
        ({"hidden_size": -64}, "do not fit"),
        ({"num_attention_heads": 0}, "zero"),
        ({"quantization": "4bit"}, "config.json"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
    ],
)
def test_settings_that_no_model_has_are_named_at_once(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    fails(write_folder(tmp_path / "m", **changes), ModelCorrupt, word)


def test_infinity_may_be_meant(tmp_path: Path) -> None:
    """Mamba's time steps have it as their limit."""
    assert load_model(write_folder(tmp_path / "m", time_step_limit=[0.0, float("inf")])).context_length == 1024


def test_an_unknown_way_of_rotating_is_refused_by_name(tmp_path: Path) -> None:
    scaling = {"type": "wonder", "factor": 2.0}
    fails(write_folder(tmp_path / "m", rope_scaling=scaling), ModelUnsupported, "RoPE type wonder")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors float-quantized"),
        ({"quant_method": "gptq", "bits": 8}, "gptq"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt FP8"),
        ({"bits": 4}, "an unnamed way"),
    ],
)
def test_what_others_quantized_and_mlx_lm_does_not_read_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], name: str
) -> None:
    folder = write_folder(tmp_path / "m", quantization_config=settings)
    fails(folder, ModelUnsupported, f"quantized as {name},", "mlx_lm.convert")
    assert foreign_quantization(CONFIG | {"quantization": {}, "quantization_config": settings}) is None, "is mlx-lm's"


def test_the_parts_of_a_checkpoint_that_are_not_read_are_named() -> None:
    assert note_unread_inputs({"vision_config": {}, "audio_config": {"x": 1}}) == (
        "its language part runs: images and audio are not read",
    )
    assert note_unread_inputs({"vision_config": None}) == ()


def test_a_broken_list_of_end_tokens_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps([3]))
    fails(folder, ModelCorrupt, "generation_config.json")


def test_a_folder_of_the_hubs_cache_is_told_the_name_to_give(tmp_path: Path) -> None:
    (tmp_path / "models--org--one" / "snapshots").mkdir(parents=True)
    with pytest.raises(ModelNotFound, match="is the hub's cache of org/one: give 'org/one' instead"):
        read_config(tmp_path / "models--org--one")
    with pytest.raises(ModelNotFound, match=r"holds no model: there is no config\.json in it\. Give a folder with"):
        read_config(tmp_path)


def test_a_folder_that_may_not_be_entered_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(ModelCorrupt, match=r"cannot be read: Permission denied\. See who may: `ls -l "):
        read_config(tmp_path)


def test_settings_that_the_configuration_leaves_out_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    left = {name: value for name, value in CONFIG.items() if name not in ("hidden_size", "rms_norm_eps")}
    (folder / "config.json").write_text(json.dumps(left))
    fails(folder, ModelCorrupt, "config.json does not say hidden_size, rms_norm_eps, which mlx-lm needs for 'llama'")


@pytest.mark.parametrize(
    ("said", "sampling"),
    [
        ({"eos_token_id": 7}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"top_k": 20, "min_p": 0, "top_p": None}, {"temperature": 1.0, "top_k": 20, "min_p": 0}),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.05},
            {"temperature": 0, "repetition_penalty": 1.05},
        ),
    ],
)
def test_the_sampling_is_what_the_makers_recommend(tmp_path: Path, said: object, sampling: object) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps(said))
    assert read_recommended_sampling(folder) == (sampling, ())
    assert load_model(folder).sampling == sampling


@pytest.mark.parametrize("value", ["hot", -1, True, [0.5], {}, float("nan"), float("inf"), 10**400])
def test_a_recommendation_that_means_nothing_is_said_and_left_out(tmp_path: Path, value: object) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": value, "top_p": value, "top_k": 3}))
    sampling, (note,) = read_recommended_sampling(folder)
    assert sampling == {"temperature": 1.0, "top_k": 3} and "temperature" in note and "top_p" in note
    assert note in load_model(folder).notes


def test_a_folder_without_generation_config_recommends_nothing(tmp_path: Path) -> None:
    assert read_recommended_sampling(write_folder(tmp_path / "m")) == ({}, ())
