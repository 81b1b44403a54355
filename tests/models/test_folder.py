"""Folders in the hub's layout: loaded as mlx-lm loads them, and every kind of damage reported in one line."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.core.prompt import tokenize
from cortexmlx.errors import InvalidRequest, ModelCorrupt, ModelNotFound, ModelUnsupported
from cortexmlx.models import load_model
from cortexmlx.models.folder import check_folder_config
from cortexmlx.models.folder_config import (
    foreign_quantization,
    note_other_answers,
    note_unread_inputs,
    older_settings,
    read_config,
    read_recommended_sampling,
)
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.vision.families import FAMILIES
from support.engine.core_driver import Driver
from support.engine.judge import assert_same, disagreement, greedy
from support.folders import CONFIG, fails, write_folder
from support.models.draft_heads import fuse_experts
from support.models.tiny import CONFIGS, tokens_of, write_tiny, write_tokenizer

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


def test_its_name_is_no_pattern(tmp_path: Path) -> None:
    folder, other = write_folder(tmp_path / "m[1]"), write_folder(tmp_path / "m1")
    wanted = logits(load_model(folder.rename(tmp_path / "m")).model)
    folder = (tmp_path / "m").rename(folder)
    (other / "model.safetensors").write_bytes(b"of another model")
    assert np.array_equal(logits(load_model(folder).model), wanted)


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


def test_floats_of_8_bits_with_one_scale_each_are_read_as_their_makers_mean_them(tmp_path: Path) -> None:
    """Ministral 3 is published so. mlx-lm's class multiplies the codes by the scale."""
    import mlx.core as mx

    folder = write_vision(tmp_path / "m", "mistral3", as_transformers_now, "model.vision_tower")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    file, scale, exact = str(folder / "model.safetensors"), mx.array(0.25, mx.bfloat16), {}
    weights: Any = dict(mx.load(file))
    for name in [name for name in weights if "_proj" in name]:
        weights[name] = mx.to_fp8(weights[name] / scale)
        exact[name] = np.array(mx.from_fp8(weights[name], dtype=mx.float32) * scale)
        weights |= {f"{name}_scale_inv": scale, f"{name.removesuffix('weight')}activation_scale": scale}
    mx.save_safetensors(file, weights)
    model = dict(load_model(folder).model.named_modules())
    assert len(exact) == 14
    for name, wanted in exact.items():
        path = "language_model.model" + name.removeprefix("model.language_model").removesuffix(".weight")
        assert np.array_equal(np.array(model[path].weight), wanted), name


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


# -- What the JSON files of a folder say, and what no model means -----------------------------------------------------


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


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
FAR, NEAR = {"rope_theta": 500.0, "rope_type": "linear", "factor": 8.0}, {"rope_theta": 100.0, "rope_type": "default"}


S, F, LINEAR = "sliding_attention", "full_attention", "linear_attention"
ORDER = {"sliding_window": 3, "layer_types": [S, F, S, F], "num_hidden_layers": 4}
NEOX = {"model_type": "gpt_neox", "layer_norm_eps": 1e-5}
EXAONE4 = {"model_type": "exaone4", "rope_scaling": None, "tie_word_embeddings": True}
GEMMA4 = ORDER | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
GEMMA4 |= {"attention_k_eq_v": True}


@pytest.mark.parametrize(
    ("kind", "before", "now"),
    [
        ("llama", {"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}),
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3"} | LLAMA3},
        ),
        (
            "gemma3_text",
            {"rope_theta": 500.0, "rope_local_base_freq": 100.0, "rope_scaling": {"type": "linear", "factor": 8.0}},
            {"rope_parameters": {F: FAR, S: NEAR}},
        ),
        (
            "llama",
            NEOX | {"rotary_pct": 0.5, "rotary_emb_base": 500, "rope_theta": 500},
            NEOX | {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500, "rope_type": "default"}},
        ),
        ("gpt2", {"n_ctx": 512}, {}),
        ("lfm2", {"block_dim": 32}, {}),
        ("llama", {"model_type": "exaone", "num_layers": 2, "layer_norm_epsilon": 1e-5}, {"model_type": "exaone"}),
        ("qwen3_next", {"num_experts": 4}, {"num_local_experts": 4}),
        ("qwen3_next", {"full_attention_interval": 2}, {"layer_types": [LINEAR, F] * 2}),
        ("qwen3_5", {"model_type": "qwen3_5"}, {"model_type": "qwen3_5_text"}),
        ("gemma3_text", ORDER | {"sliding_window_pattern": 2}, ORDER),
        ("cohere2", ORDER | {"sliding_window_pattern": 2}, ORDER),
        (
            "llama",
            EXAONE4 | ORDER | {"sliding_window_pattern": "LGLG"},
            EXAONE4 | ORDER | {"sliding_window_pattern": 2},
        ),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba", "attention"], "position_embedding_type": "nope", "num_hidden_layers": 2},
            {"layer_types": [LINEAR, F], "position_embedding_type": None, "num_hidden_layers": 2},
        ),
        (
            "llama",
            GEMMA4 | {"global_head_dim": 16, "num_global_key_value_heads": 1},
            GEMMA4 | {"per_layer_config": {str(i): {"head_dim": 16, "num_key_value_heads": 1} for i in (1, 3)}},
        ),
    ],
)
def test_settings_are_read_as_transformers_5_writes_them(
    tmp_path: Path, kind: str, before: dict[str, Any], now: dict[str, Any]
) -> None:
    """mlx-lm reads them in some classes only, and takes defaults for the rest."""
    from mlx_lm import load

    folder = write_tiny(tmp_path / "m", kind, **before)
    wanted = logits(load(str(folder))[0])
    config = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in before}
    (folder / "config.json").write_text(json.dumps(kept | now))
    assert np.array_equal(logits(load_model(folder).model), wanted)


def test_settings_of_a_language_part_are_read_as_transformers_5_writes_them() -> None:
    rope = {F: FAR | {"partial_rotary_factor": 0.5}, S: NEAR}
    text = {"rope_parameters": rope, "rope_theta": 7.0, "n": 1, "tie_word_embeddings": False}
    config = {"text_config": text, "tie_word_embeddings": True}
    within = older_settings(config)["text_config"]
    assert (within["rope_theta"], within["n"]) == (7.0, 1), "it says this itself"
    assert within["tie_word_embeddings"], "the outer one counts"
    for outer, tensors, tied in ((True, ["lm_head.weight"], False), (False, ["norm.weight"], True), (False, [], False)):
        config = {"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": outer}
        assert older_settings(config, tensors)["text_config"]["tie_word_embeddings"] is tied, tensors
    moe = older_settings({"text_config": {"model_type": "qwen3_vl_moe_text", "vocab_size": 9}})
    assert (moe["vocab_size"], moe["text_config"]["norm_topk_prob"]) == (9, True)
    with pytest.raises(ModelUnsupported, match="language part is 'gemma', but mlx-lm"):
        older_settings({"model_type": "llava", "text_config": {"model_type": "gemma"}})
    assert "partial_rotary_factor" not in within, "it is not of all layers"


def test_settings_of_any_type_are_read_or_refused_in_words() -> None:
    names = ("layer_types", "per_layer_config", "rope_parameters", "n_groups", "num_experts", "clip_qkv", "head_dim")
    values = (None, True, 1.5, "x", [[1]], {"a": 1}, [F, 3, [1]], {F: {"rope_theta": [1]}, S: 3})
    for kind, name, value in product(("cohere2", "granitemoehybrid", "olmoe", "mamba2", [1], {}), names, values):
        config = {"model_type": "gemma3", "text_config": {"model_type": kind, name: value, "sliding_window": 8}}
        with suppress(ModelUnsupported):
            older_settings(config)
        note_other_answers(config | {name: value})


def test_an_order_of_layers_that_mlx_lm_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", "gemma3_text", **ORDER | {"layer_types": [F, S, S, F]})
    fails(folder, ModelUnsupported, "full attention in the layers [1, 4]", "every n-th")


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("gpt_oss", {"swiglu_limit": 1.0}),
        ("gemma3_text", {"final_logit_softcapping": 3.0}),
        ("llama", {"hidden_act": "relu"}),
    ],
)
def test_a_setting_that_mlx_lm_does_not_read_is_refused(tmp_path: Path, kind: str, setting: dict[str, Any]) -> None:
    (name, value), *_ = setting.items()
    folder = write_tiny(tmp_path / "m", kind, **setting)
    fails(folder, ModelUnsupported, f"has {name} {json.dumps(value)}, but mlx-lm", "only as")
    with pytest.raises(ModelUnsupported):  # before its weights are fetched
        check_folder_config(folder)


def test_the_part_of_a_head_that_glm_rotates_and_falcon_h1s_factor_of_keys_are_applied(tmp_path: Path) -> None:
    """mlx-lm reads neither."""
    import mlx.core as mx

    folder = write_tiny(tmp_path / "glm", model_type="glm", rope_parameters={"partial_rotary_factor": 0.5})
    assert {layer.self_attn.rope.dims for layer in load_model(folder).model.layers} == {4}
    folder = write_tiny(tmp_path / "falcon", "falcon_h1", key_multiplier=0.25)
    mine = logits(load_model(folder).model)
    file = str(folder / "model.safetensors")
    weights: Any = {name: w * (0.25 if "k_proj" in name else 1.0) for name, w in dict(mx.load(file)).items()}
    mx.eval(weights)
    mx.save_safetensors(file, weights)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"key_multiplier": 1.0}))
    assert np.abs(logits(load_model(folder).model) - mine).max() < 1e-5


@pytest.mark.parametrize(
    ("settings", "notes"),
    [
        ({"model_type": "gemma2", "sliding_window": 64, "max_position_embeddings": 128}, ["beyond 64 tokens"]),
        ({"model_type": "mistral", "sliding_window": 64, "max_position_embeddings": 64}, []),
        ({"model_type": "jamba"}, ["chosen experts"]),
        ({"model_type": "ernie4_5_moe"}, ["e_score_correction_bias"]),
        ({"model_type": "mamba2", "n_groups": 8}, ["groups"]),
        ({"model_type": "mamba2", "n_groups": 1}, []),
        ({"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "all"}}, ["no token of a text"]),
        ({"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "vision"}}, []),
    ],
)
def test_where_mlx_lm_computes_otherwise_is_told(settings: dict[str, Any], notes: list[str]) -> None:
    told = note_other_answers(settings)
    assert len(told) == len(notes) and all(words in note for words, note in zip(notes, told, strict=True)), told


def fuse(weights: dict[str, Any]) -> dict[str, Any]:
    """gpt-oss's experts as transformers saves them."""
    import mlx.core as mx

    for stem in {name.split("gate_proj")[0] for name in weights if "gate_proj" in name}:
        both = [[weights.pop(f"{stem}{part}_proj.{of}") for part in ("gate", "up")] for of in ("weight", "bias")]
        matrices, weights[f"{stem}gate_up_proj_bias"] = (mx.stack(pair, 2).flatten(1, 2) for pair in both)
        weights[f"{stem}gate_up_proj"] = matrices.swapaxes(1, 2)
        weights[f"{stem}down_proj"] = weights.pop(f"{stem}down_proj.weight").swapaxes(1, 2)
        weights[f"{stem}down_proj_bias"] = weights.pop(f"{stem}down_proj.bias")
    return weights


def prefix(weights: dict[str, Any]) -> dict[str, Any]:
    """gpt2's names as transformers saves them."""
    swapped = {name: w.T if "c_" in name and w.ndim > 1 else w for name, w in weights.items()}
    return {name.replace("model.", "transformer."): weight for name, weight in swapped.items()}


def unstack(weights: dict[str, Any]) -> dict[str, Any]:
    """qwen3_5_moe's experts as transformers saves them."""
    for name in [name for name in weights if "switch_mlp" in name]:
        for i, matrix in enumerate(weights.pop(name)):
            weights[name.replace("switch_mlp", f"experts.{i}")] = matrix
    return weights


def move_head(weights: dict[str, Any]) -> dict[str, Any]:
    """gemma4's output matrix as transformers saves it."""
    return {name.replace("language_model.lm_head", "lm_head"): weight for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        ("gpt_oss", fuse),
        ("gpt2", prefix),
        ("qwen3_5_moe", unstack),
        ("qwen3_vl_moe", fuse_experts),
        ("gemma4", move_head),
    ],
)
def test_tensors_are_read_as_transformers_5_saves_them(
    tmp_path: Path, kind: str, saved: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_model as load

    write: Any = partial(write_vision, renamed=as_mlx_community) if kind in TEXT else write_tiny
    folder = write(tmp_path / "m", kind)
    file = str(folder / "model.safetensors")
    wanted = logits(load(folder)[0])
    weights: Any = dict(mx.load(file))
    mx.eval(weights)
    mx.save_safetensors(file, saved(weights))
    assert np.abs(logits(load_model(folder).model) - wanted).max() < 1e-5


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
    if "quant_algo" in settings:  # NVIDIA also writes it to a file of its own
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": settings}))
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
    with pytest.raises(ModelCorrupt, match=r"cannot be read: Permission denied\. See who may: `ls -ld "):
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


# Folders quantized in every way that mlx-lm writes, and in those of others that it reads: the tokens are mlx-lm's.


SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
PROMPTS = [tokens_of(n, seed=n) for n in (5, 33)]
Predicate = Callable[[str, Any], Any]


def quantized(folder: Path, name: str, predicate: Predicate | None = None, dtype: str = "bfloat16", **how: Any) -> Path:
    """A tiny model through mlx-lm's own `quantize_model` and `save_model`."""
    import mlx.core as mx
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    write_tiny(folder, name, **SIZES)
    model, config = load_model(folder)
    model.set_dtype(getattr(mx, dtype))
    settings = {"group_size": None, "bits": None, "mode": "affine"} | how
    model, config = quantize_model(model, config, quant_predicate=predicate, **settings)
    (folder / "model.safetensors").unlink()
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return folder


def assert_mlx_lms_tokens(folder: Path, count: int = 10) -> None:
    """As they are packed and as float32."""
    import mlx.core as mx
    from mlx_lm import load

    judge, tokenizer = load(str(folder))
    judge.set_dtype(mx.float32)
    wanted = [greedy(judge, tokenizer, prompt, count) for prompt in PROMPTS]
    for dequantize in (False, True):
        driver = Driver(folder, dequantize=dequantize)
        for prompt, mine, theirs in zip(PROMPTS, driver.answers(PROMPTS, count, ignore_eos=False), wanted, strict=True):
            assert_same(judge, prompt, mine, theirs)


def mixed(path: str, module: Any) -> Any:
    """What mixed recipes do, DWQ's among them: more bits where it counts, other formats, some layers not at all."""
    if "down_proj" in path or "embed" in path:
        return {"bits": 6, "group_size": 64}
    if "up_proj" in path:
        return {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    return "q_proj" not in path


def test_a_recipe_for_every_layer(tmp_path: Path) -> None:
    assert_mlx_lms_tokens(quantized(tmp_path / "m", "llama", mixed))


def test_activations_that_are_quantized_too_are_refused_on_a_cpu(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "m", "llama", mode="nvfp4")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantize_activations": True}))
    for dequantize in (False, True):
        with pytest.raises(ModelUnsupported, match="quantize their activations"):
            load_model(folder, dequantize=dequantize)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_all_bits_in_all_groups(tmp_path: Path, name: str, bits: int, group: int) -> None:
    assert_mlx_lms_tokens(quantized(tmp_path / "m", name, bits=bits, group_size=group, dtype="float16"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss", "qwen3"])
@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_all_formats_of_small_floats(tmp_path: Path, name: str, mode: str) -> None:
    assert_mlx_lms_tokens(quantized(tmp_path / "m", name, mode=mode))


def test_experts_with_a_scale_of_their_own_become_float32_or_are_refused(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "m", "mixtral", mode="nvfp4", global_scale=True)
    assert load_model(folder).dtype == "float32"
    with pytest.raises(ModelUnsupported, match=r"nvfp4 experts .* dequantize=True"):
        load_model(folder, dequantize=False)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs is at each place of a 32-bit word, from the lowest bits on."""


def pack_awq(values: np.ndarray) -> np.ndarray:
    """4-bit values `[inputs, outputs]` as AutoAWQ packs them."""
    eights = values.reshape(len(values), -1, 8).astype(np.uint32)
    words = np.zeros(eights.shape[:2], np.uint32)
    for place, index in enumerate(AWQ_ORDER):
        words |= eights[:, :, index] << np.uint32(4 * place)
    return words.view(np.int32)


def test_awq_is_read_as_its_makers_mean_it(tmp_path: Path) -> None:
    """A weight is (code - zero) * scale, by groups of inputs. Zeros and scales are chosen so that float16 has all."""
    import mlx.core as mx

    settings = {"quant_method": "awq", "bits": 4, "group_size": 64}
    folder = write_tiny(tmp_path / "m", **SIZES, quantization_config=settings)
    file = str(folder / "model.safetensors")
    weights: Any = {name: array.astype(mx.float16) for name, array in mx.load(file).items()}
    rng, exact = np.random.default_rng(1), {}
    for name in [name for name in weights if "_proj" in name]:
        outputs, inputs = weights.pop(name).shape
        codes, zeros = (rng.integers(0, 16, (rows, outputs)) for rows in (inputs, inputs // 64))
        scales = 2.0 ** rng.integers(-7, -4, (inputs // 64, outputs))
        exact[name] = ((codes - zeros.repeat(64, 0)) * scales.repeat(64, 0)).T
        stem = name.removesuffix("weight")
        weights |= {f"{stem}qweight": mx.array(pack_awq(codes)), f"{stem}qzeros": mx.array(pack_awq(zeros))}
        weights[f"{stem}scales"] = mx.array(scales.astype(np.float16))
    mx.save_safetensors(file, weights)
    model = dict(load_model(folder).model.named_modules())
    assert len(exact) == 14
    for name, wanted in exact.items():
        assert np.array_equal(np.array(model[name.removesuffix(".weight")].weight), wanted.astype(np.float32)), name


def test_gptq_is_refused_by_name(tmp_path: Path) -> None:
    import mlx.core as mx

    folder = write_tiny(tmp_path / "m", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    file = str(folder / "model.safetensors")
    weights: Any = dict(mx.load(file))
    weights["model.layers.0.mlp.up_proj.g_idx"] = mx.arange(32)
    mx.save_safetensors(file, weights)
    with pytest.raises(ModelUnsupported, match=r"quantized as gptq.*g_idx.*mlx_lm\.convert"):
        load_model(folder)


def test_ternary_weights_become_float32_or_are_refused(tmp_path: Path) -> None:
    import mlx.core as mx

    folder = write_tiny(tmp_path / "m", quantization_config={"quant_method": "bitnet", "linear_class": "autobitlinear"})
    file = str(folder / "model.safetensors")
    weights: Any = dict(mx.load(file))
    for name in [name for name in weights if "_proj" in name]:
        rows, inputs = weights[name].shape
        weights[name] = mx.random.randint(0, 85, (rows // 4, inputs)).astype(mx.uint8)
        weights[name.removesuffix("weight") + "weight_scale"] = mx.array([0.3])
    mx.save_safetensors(file, weights)
    with pytest.raises(ModelUnsupported, match=r"ternary layers .* dequantize=True"):
        load_model(folder, dequantize=False)
    assert len(Driver(folder).answers(PROMPTS, 4)[1]) == 4


# -- Checkpoints with a vision part, in the layouts that mlx-lm reads: their language part gives mlx-lm's tokens ------


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
QWEN3_MOE = {"model_type": "qwen3_moe", "mlp_only_layers": [], "norm_topk_prob": True, "tie_word_embeddings": False}
TEXT: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"model_type": "qwen2"},
    "qwen2_5_vl": {"model_type": "qwen2"},
    "qwen3_vl": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_vl_moe": QWEN3_MOE | EXPERTS,
    "gemma3": CONFIGS["gemma3_text"],
    "gemma4": GEMMA4 | {"tie_word_embeddings": False},
    "mistral3": {"model_type": "ministral3", "rope_parameters": ROPE},
    "llava": {"model_type": "ministral3", "rope_parameters": ROPE},
    "pixtral": {"model_type": "mistral"},
}
"""The language part of each, beside what a tiny llama has."""


def as_mlx_community(name: str) -> str:
    return name


def as_first_published(name: str) -> str:
    return name.removeprefix("language_model.")


def as_transformers_now(name: str) -> str:
    inner = name.removeprefix("language_model.")
    return inner.replace("model.", "model.language_model.", 1) if inner.startswith("model.") else inner


def write_vision(folder: Path, kind: str, renamed: Callable[[str], str], *towers: str) -> Path:
    """A checkpoint whose tensors have the names of a layout, with towers of one tensor each."""
    import mlx.core as mx

    text = CONFIGS["llama"] | TEXT[kind]
    config = {"model_type": kind, "text_config": text, "vision_config": {"hidden_size": 24}, "eos_token_id": 257}
    config |= {"tie_word_embeddings": text.get("tie_word_embeddings", True), "vocab_size": text["vocab_size"]}
    CONFIGS[f"vision {kind}"] = config
    try:
        write_tiny(folder, f"vision {kind}")
    finally:
        del CONFIGS[f"vision {kind}"]
    file = str(folder / "model.safetensors")
    weights: Any = {renamed(name): array for name, array in dict(mx.load(file)).items()}
    mx.eval(weights)
    mx.save_safetensors(file, weights | {f"{tower}.patch.weight": mx.zeros((8, 8)) for tower in towers})
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "renamed", "tower"),
    [
        ("qwen2_vl", as_mlx_community, "vision_tower"),
        ("qwen2_vl", as_first_published, "visual"),
        ("qwen2_5_vl", as_transformers_now, "model.visual"),
        ("qwen3_vl", as_transformers_now, "model.visual"),
        ("qwen3_vl_moe", as_mlx_community, "vision_tower"),
        ("gemma3", as_mlx_community, "multi_modal_projector"),
        ("mistral3", as_transformers_now, "model.vision_tower"),
        ("llava", as_mlx_community, "vision_tower"),
        ("pixtral", as_mlx_community, "vision_tower"),
    ],
)
def test_the_language_part_gives_mlx_lms_tokens(
    tmp_path: Path, kind: str, renamed: Callable[[str], str], tower: str
) -> None:
    from mlx_lm import load

    folder = write_vision(tmp_path / "m", kind, renamed, tower)
    judge, tokenizer = load(str(folder))
    driver = Driver(folder)
    for prompt, mine in zip(PROMPTS, driver.answers(PROMPTS, 5, ignore_eos=False), strict=True):
        assert disagreement(judge, prompt, mine, greedy(judge, tokenizer, prompt, 5)) is None
    first, *why = driver.core.info.notes  # the towers are made up
    assert first == "its language part runs: images are not read"
    assert all(note.startswith("images are not seen: the vision_config") for note in why)
    assert bool(why) == (kind in FAMILIES)


def test_a_layout_that_mlx_lm_does_not_know_is_told_as_that(tmp_path: Path) -> None:
    folder = write_vision(tmp_path / "m", "qwen3_vl_moe", as_first_published, "visual")
    with pytest.raises(ModelCorrupt, match=r"mlx-lm looks for 'language_model'.*'qwen3_vl_moe'.*names its parts"):
        load_model(folder)


def test_an_image_in_a_message_is_refused_and_text_parts_are_read(tmp_path: Path) -> None:
    """The template is the one that processors of images read."""
    folder = write_vision(tmp_path / "m", "qwen2_vl", as_mlx_community, "vision_tower")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.content if m.content is string else '<|image_pad|>' }}{% endfor %}"
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = SharedTokenizer(load_model(folder).tokenizer)
    text = {"type": "text", "text": "Hello"}
    assert tokenize(tokenizer, [{"role": "user", "content": [text, text]}]) == tokenizer.encode("HelloHello")
    with pytest.raises(InvalidRequest, match="part of type 'image'"):
        tokenize(tokenizer, [{"role": "user", "content": [text, {"type": "image", "image": "cat.png"}]}])
