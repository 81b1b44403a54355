"""The configuration in a GGUF file's metadata: refused by name where not served, corrupt if it contradicts itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models import load_model
from cortexmlx.models.gguf.config import ModelDescription, activation_type, describe_model
from cortexmlx.models.gguf.file import read_gguf_header
from support.gguf.export import export, tiny
from support.gguf.models import metadata, refused, tensors, write_model
from support.gguf.writer import Uint32, write_gguf


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (metadata("mamba"), "'mamba'"),
        (metadata(llama__rope__scaling__type="longrope", llama__rope__scaling__factor=2.0), "'longrope'"),
        (
            metadata(llama__rope__scaling__type="yarn", llama__rope__scaling__yarn_log_multiplier=0.1),
            "yarn_log_multiplier",
        ),
        (metadata(llama__rope__dimension_count=Uint32(8)), "part of each head"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, header: dict[str, Any], says: str) -> None:
    refused(tmp_path, ModelUnsupported, says, header=header)


def test_experts_of_an_architecture_that_has_none_are_refused(tmp_path: Path) -> None:
    header = metadata("qwen2", qwen2__expert_count=Uint32(8))
    refused(tmp_path, ModelUnsupported, "experts", "qwen2", architecture="qwen2", header=header)


@pytest.mark.parametrize("key", ["llama.block_count", "llama.context_length", "tokenizer.ggml.tokens"])
def test_missing_metadata_is_named(tmp_path: Path, key: str) -> None:
    refused(tmp_path, ModelCorrupt, header={k: v for k, v in metadata().items() if k != key})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.head_count", Uint32(0)),
        ("llama.attention.head_count", "four"),
        ("llama.attention.head_count_kv", Uint32(1)),
        ("llama.embedding_length", Uint32(128)),
        ("llama.feed_forward_length", Uint32(97)),
        ("llama.block_count", Uint32(3)),
        ("llama.block_count", Uint32(1)),
        ("llama.rope.freq_base", -1.0),
        ("tokenizer.ggml.eos_token_id", Uint32(100_000)),
        ("tokenizer.ggml.token_type", [1, 1]),
        ("tokenizer.ggml.merges", ["x y z", "no such"]),
        ("tokenizer.ggml.merges", []),
        ("tokenizer.ggml.tokens", [1, 2]),
    ],
)
def test_metadata_that_contradicts_itself_is_corrupt(tmp_path: Path, key: str, value: Any) -> None:
    path = write_model(tmp_path / "tiny.gguf", header=metadata() | {key: value})
    with pytest.raises(ModelCorrupt) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_the_configuration_is_that_of_the_metadata_in_the_words_of_config_json(tmp_path: Path) -> None:
    header = metadata("qwen3", qwen3__rope__scaling__type="yarn", qwen3__rope__scaling__factor=4.0)
    header["qwen3.rope.scaling.original_context_length"] = Uint32(128)
    path = write_model(tmp_path / "tiny.gguf", "qwen3", header=header, tied=False)
    assert describe_model(read_gguf_header(path)).config == {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": pytest.approx(1e-5),
        "vocab_size": 263,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    }


def description_of(path: Path, name: str, **changes: Any) -> ModelDescription:
    """The description of a tiny model's file whose metadata of the architecture is changed (None: left out)."""
    model = tiny()[name]
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    export(path / "tiny.gguf", replace(model, metadata=model.metadata | changed))
    return describe_model(read_gguf_header(path / "tiny.gguf"))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "attention__clamp_kqv", 8.0),
        ("llama", "attention__sliding_window", Uint32(64)),
        ("llama", "rope__scaling__yarn_attn_factor", 0.5),
        ("llama", "attention__causal", False),
        ("qwen2", "attn_logit_softcapping", 50.0),
        ("qwen2moe", "rope__scaling__type", "yarn"),
        ("qwen3moe", "expert_weights_scale", 2.5),
        ("qwen3moe", "expert_gating_func", Uint32(2)),
        ("gemma3", "final_logit_softcapping", 30.0),
        ("gemma3", "attention__scale", 0.5),
        ("gemma3", "attention__sliding_window_pattern", Uint32(9)),
        ("phi3", "rope__scaling__attn_factor", 1.0),
        ("phi3", "attention__sliding_window", Uint32(64)),
        ("gpt-oss", "rope__scaling__yarn_log_multiplier", 0.1),
    ],
)
def test_a_setting_that_changes_results_is_refused(tmp_path: Path, name: str, key: str, value: Any) -> None:
    with pytest.raises(ModelUnsupported, match=r"tiny\.gguf"):
        description_of(tmp_path, name, **{key: value})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "attention__scale", 0.25),
        ("llama", "attention__causal", True),
        ("llama", "attention__sliding_window", Uint32(512)),
        ("llama", "expert_count", Uint32(0)),
        ("llama", "rope__scaling__type", "none"),
        ("llama", "tensor_data_layout", "Meta AI original pth"),
        ("qwen3moe", "expert_weights_scale", 1.0),
        ("qwen3moe", "expert_gating_func", Uint32(1)),
    ],
)
def test_a_setting_that_changes_nothing_is_taken(tmp_path: Path, name: str, key: str, value: Any) -> None:
    assert description_of(tmp_path, name, **{key: value}).config == description_of(tmp_path, name).config


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("phi3", "rope__scaling__original_context_length", Uint32(1)),
        ("mixtral", "expert_used_count", Uint32(5)),
        ("mixtral", "expert_used_count", Uint32(0)),
        ("gemma3", "attention__sliding_window", Uint32(0)),
    ],
)
def test_numbers_that_no_model_has_are_corrupt(tmp_path: Path, name: str, key: str, value: Any) -> None:
    with pytest.raises(ModelCorrupt, match=r"tiny\.gguf"):
        description_of(tmp_path, name, **{key: value})


def test_a_base_of_one_is_no_model(tmp_path: Path) -> None:
    header = metadata(llama__rope__freq_base=1.0, llama__rope__scaling__type="yarn", llama__rope__scaling__factor=2.0)
    header["llama.rope.scaling.original_context_length"] = Uint32(64)
    refused(tmp_path, ModelCorrupt, "describes no model", header=header)


def test_yarn_has_the_ramp_of_the_file(tmp_path: Path) -> None:
    betas = {"rope__scaling__yarn_beta_fast": 8.0, "rope__scaling__yarn_beta_slow": 2.0}
    scaling = description_of(tmp_path, "gpt-oss", **betas).config["rope_scaling"]
    assert (scaling["beta_fast"], scaling["beta_slow"]) == (8.0, 2.0)


def test_rope_factors_and_a_scaling_exclude_each_other(tmp_path: Path) -> None:
    stored = tensors("F32") | {"rope_freqs.weight": ("F32", (8,), bytes(32))}
    header = metadata(llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0)
    with pytest.raises(ModelUnsupported, match="rope_freqs"):
        describe_model(read_gguf_header(write_gguf(tmp_path / "tiny.gguf", header, stored)))


@pytest.mark.parametrize("kind", ["long", "short"])
def test_long_rope_with_one_list_of_factors_is_not_run_without_any(tmp_path: Path, kind: str) -> None:
    export(tmp_path / "tiny.gguf", tiny()["phi3"])
    header = read_gguf_header(tmp_path / "tiny.gguf")
    del header.tensors[f"rope_factors_{kind}.weight"]
    with pytest.raises(ModelCorrupt, match=f"no tensor 'rope_factors_{kind}.weight'"):
        describe_model(header)


@pytest.mark.parametrize(("name", "window"), [("gemma2", 128), ("phi3", 200)])
def test_contexts_end_where_a_window_that_mlx_lm_lacks_would_begin(tmp_path: Path, name: str, window: int) -> None:
    model = tiny()[name]
    config = {key: value for key, value in model.config.items() if key != "rope_scaling"}
    keys = {key: value for key, value in model.metadata.items() if "rope" not in key}
    config["partial_rotary_factor"] = 1.0
    model = replace(model, config=config, metadata=keys | {"attention.sliding_window": Uint32(window)})
    export(tmp_path / "tiny.gguf", model)
    loaded = load_model(tmp_path / "tiny.gguf")
    assert loaded.context_length == window
    assert any(f"{window} tokens" in note for note in loaded.notes)


@pytest.mark.parametrize(("layers", "scalar"), [(2, 32), (46, 16)])
def test_the_largest_gemma_2_scales_its_scores_by_its_width(tmp_path: Path, layers: int, scalar: int) -> None:
    model = tiny()["gemma2"]
    model = replace(model, config=model.config | {"num_hidden_layers": layers, "query_pre_attn_scalar": scalar})
    export(tmp_path / "tiny.gguf", model)
    assert describe_model(read_gguf_header(tmp_path / "tiny.gguf")).config["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize(
    ("name", "types", "wanted"),
    [
        ("llama", "Q8_0", "float16"),
        ("llama", "F16", "float16"),
        ("llama", "BF16", "bfloat16"),
        ("llama", "F32", "float32"),
        ("mixtral", "Q5_0", "float16"),
        ("gemma3", "Q8_0", "bfloat16"),
        ("gemma3", "BF16", "bfloat16"),
        ("gemma3", "F16", "float32"),
        ("gpt-oss", "MXFP4", "bfloat16"),
    ],
)
def test_activations_have_a_type_that_loses_nothing_of_the_matrices_and_holds_them(
    tmp_path: Path, name: str, types: str, wanted: str
) -> None:
    export(tmp_path / "tiny.gguf", tiny()[name], types)
    header = read_gguf_header(tmp_path / "tiny.gguf")
    assert activation_type(header, describe_model(header)) == wanted
