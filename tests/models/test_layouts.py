"""Settings and tensors in the layouts of transformers and mlx-lm: read as their makers mean them, or refused."""

from __future__ import annotations

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
from cortexmlx.errors import InvalidRequest, ModelCorrupt, ModelUnsupported
from cortexmlx.models import load_model
from cortexmlx.models.folder import check_folder_config
from cortexmlx.models.folder_config import note_differences_from_transformers, translate_settings
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.vision.families import FAMILIES
from support.engine.core_driver import Driver
from support.engine.judge import disagreement, greedy
from support.folders import fails, logits
from support.models.draft_heads import fuse_experts
from support.models.tiny import CONFIGS, tokens_of, write_tiny, write_tokenizer

pytestmark = pytest.mark.usefixtures("a_linux_cpu")

PROMPTS = [tokens_of(n, seed=n) for n in (5, 33)]
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
    within = translate_settings(config)["text_config"]
    assert (within["rope_theta"], within["n"]) == (7.0, 1), "it says this itself"
    assert within["tie_word_embeddings"], "the outer one counts"
    for outer, tensors, tied in ((True, ["lm_head.weight"], False), (False, ["norm.weight"], True), (False, [], False)):
        config = {"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": outer}
        assert translate_settings(config, tensors)["text_config"]["tie_word_embeddings"] is tied, tensors
    moe = translate_settings({"text_config": {"model_type": "qwen3_vl_moe_text", "vocab_size": 9}})
    assert (moe["vocab_size"], moe["text_config"]["norm_topk_prob"]) == (9, True)
    with pytest.raises(ModelUnsupported, match="language part is 'gemma', but mlx-lm"):
        translate_settings({"model_type": "llava", "text_config": {"model_type": "gemma"}})
    assert "partial_rotary_factor" not in within, "it is not of all layers"


def test_settings_of_any_type_are_read_or_refused_in_words() -> None:
    names = ("layer_types", "per_layer_config", "rope_parameters", "n_groups", "num_experts", "clip_qkv", "head_dim")
    values = (None, True, 1.5, "x", [[1]], {"a": 1}, [F, 3, [1]], {F: {"rope_theta": [1]}, S: 3})
    for kind, name, value in product(("cohere2", "granitemoehybrid", "olmoe", "mamba2", [1], {}), names, values):
        config = {"model_type": "gemma3", "text_config": {"model_type": kind, name: value, "sliding_window": 8}}
        with suppress(ModelUnsupported):
            translate_settings(config)
        note_differences_from_transformers(config | {name: value})


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
    told = note_differences_from_transformers(settings)
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
