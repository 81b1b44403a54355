"""Folders in the hub's layout: loaded as mlx-lm loads them, and every kind of damage reported in one line."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from cortexmlx.models import load_model
from cortexmlx.models.folder_config import (
    foreign_quantization,
    note_unread_inputs,
    read_config,
    read_recommended_sampling,
)
from support.engine.core_driver import Driver
from support.engine.judge import assert_same, greedy
from support.folders import CONFIG, fails, logits, write_folder
from support.models.tiny import tokens_of, write_tiny

pytestmark = pytest.mark.usefixtures("a_linux_cpu")


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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("config.json", text) for text in ("", "{", "[]", "\x00", '{"hidden_size": 3}', '{"model_type": 4}')),
        *(("tokenizer.json", text) for text in ("", "{", "{}", '{"model": 3}')),
        ("generation_config.json", "[3]"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / name).write_text(content)
    fails(folder, ModelCorrupt, "tokenizer" if name == "tokenizer.json" else name)


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
