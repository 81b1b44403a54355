"""GGUF files become mlx-lm models that compute what the file says, by float64 NumPy from the file's own bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models import load_model
from support.gguf_models import BASE, HEAD_DIM, logits, metadata, tensors, values, write_model
from support.gguf_writer import Uint32, decode, encode, write_gguf

TOKENS = [5, 250, 17, 17, 99, 3, 140, 261, 0, 42, 8, 200]


@pytest.fixture(autouse=True)
def a_linux_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded here becomes float32, as on a Linux CPU, wherever the tests run."""
    import mlx.core as mx

    monkeypatch.setattr("cortexmlx.models.load._slow_below_float32", lambda: True)
    mx.set_default_device(mx.cpu)


def computed(path: Path, dequantize: bool | None = False) -> np.ndarray:
    import mlx.core as mx

    loaded = load_model(path, dequantize=dequantize)
    return np.array(loaded.model(mx.array([TOKENS])).astype(mx.float32))[0].astype(np.float64)


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("dequantize", [False, True])
def test_every_tensor_type_computes_what_the_bytes_say(tmp_path: Path, type_name: str, dequantize: bool) -> None:
    path = write_model(tmp_path / "tiny.gguf", type_name=type_name)
    wanted = logits(values(tensors(type_name)), TOKENS)
    assert relative_error(computed(path, dequantize), wanted) < 2e-5


@pytest.mark.parametrize(("architecture", "bias"), [("llama", True), ("qwen2", True), ("qwen3", False)])
@pytest.mark.parametrize("tied", [False, True])
def test_every_architecture_computes_what_the_bytes_say(
    tmp_path: Path, architecture: str, bias: bool, tied: bool
) -> None:
    path = write_model(tmp_path / "tiny.gguf", architecture, type_name="Q8_0", bias=bias, tied=tied)
    stored = values(tensors("Q8_0", architecture, tied=tied, bias=bias))
    wanted = logits(stored, TOKENS, pairs=architecture == "llama")
    assert relative_error(computed(path), wanted) < 2e-5


def test_rope_factors_stretch_the_wavelengths(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2)
    stored = tensors("F32") | {"rope_freqs.weight": ("F32", (HEAD_DIM // 2,), encode(factors, "F32"))}
    path = write_gguf(tmp_path / "tiny.gguf", metadata(), stored)
    plain, stretched = (logits(values(tensors("F32")), TOKENS, stretch=s) for s in (1.0, factors))
    assert relative_error(plain, stretched) > 1e-2, "the factors must matter for this test to say anything"
    assert relative_error(computed(path), stretched) < 2e-5


def test_linear_rope_scaling(tmp_path: Path) -> None:
    header = metadata(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    path = write_model(tmp_path / "tiny.gguf", header=header, type_name="F32")
    assert relative_error(computed(path), logits(values(tensors("F32")), TOKENS, stretch=4.0)) < 2e-5


def yarn(factor: float, original: int, base: float = BASE) -> tuple[np.ndarray, float]:
    """Stretch of each wavelength and amplitude, by the YaRN paper (sections 3.2 and 3.4; alpha 1, beta 32)."""
    at = np.arange(HEAD_DIM // 2)

    def dimension(rotations: float) -> float:
        return HEAD_DIM * np.log(original / (rotations * 2 * np.pi)) / (2 * np.log(base))

    low, high = np.floor(dimension(32)), np.ceil(dimension(1))
    ramp = np.clip((at - max(low, 0)) / (min(high, HEAD_DIM - 1) - max(low, 0)), 0, 1)
    return 1 / (ramp / factor + (1 - ramp)), 0.1 * np.log(factor) + 1


def test_yarn_rope_scaling(tmp_path: Path) -> None:
    header = metadata(llama__rope__scaling__type="yarn", llama__rope__scaling__factor=4.0)
    header["llama.rope.scaling.original_context_length"] = Uint32(128)
    path = write_model(tmp_path / "tiny.gguf", header=header, type_name="F32")
    stretch, amplitude = yarn(4.0, 128)
    assert len(set(stretch)) > 1 and {1.0, 4.0} <= set(stretch), "a ramp between both ends"
    wanted = logits(values(tensors("F32")), TOKENS, stretch=stretch, amplitude=amplitude)
    assert relative_error(computed(path), wanted) < 2e-5


def test_a_factor_without_a_kind_is_linear(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", header=metadata(llama__rope__scaling__factor=4.0), type_name="F32")
    assert relative_error(computed(path), logits(values(tensors("F32")), TOKENS, stretch=4.0)) < 2e-5


@pytest.mark.parametrize(("type_name", "bits"), [("Q8_0", 8), ("Q4_0", 4), ("Q4_1", 4)])
def test_quantized_layers_stay_quantized(tmp_path: Path, type_name: str, bits: int) -> None:
    import mlx.core as mx
    import mlx.nn as nn

    loaded = load_model(write_model(tmp_path / "tiny.gguf", type_name=type_name, tied=False), dequantize=False)
    packed = [m for _, m in loaded.model.named_modules() if isinstance(m, nn.QuantizedLinear | nn.QuantizedEmbedding)]
    assert len(packed) == 2 * 7 + 2
    assert {(m.bits, m.group_size) for m in packed} == {(bits, 32)}
    assert not any(type(m) in (nn.Linear, nn.Embedding) for _, m in loaded.model.named_modules())
    embedding = loaded.model.model.embed_tokens
    found = mx.dequantize(embedding.weight, embedding.scales, embedding.biases, 32, bits)
    kind, shape, data = tensors(type_name, tied=False)["token_embd.weight"]
    assert np.array_equal(np.array(found, dtype=np.float32), decode(data, kind, shape).astype(np.float32))


def test_mixed_types_share_one_activation_dtype(tmp_path: Path) -> None:
    stored = tensors("Q4_1", tied=False) | {
        name: entry for name, entry in tensors("F16", tied=False).items() if name == "output.weight"
    }
    path = write_gguf(tmp_path / "tiny.gguf", metadata(), stored)
    assert load_model(path, dequantize=False).dtype == "float32"
    assert relative_error(computed(path), logits(values(stored), TOKENS)) < 2e-5


@pytest.mark.parametrize(
    ("matrices", "head", "dtype"),
    [
        ("F32", "F32", "float32"),
        ("F16", "F16", "float16"),
        ("BF16", "BF16", "bfloat16"),
        ("Q4_1", "Q4_1", "float16"),
        ("Q8_0", "F16", "float16"),
        ("Q8_0", "F32", "float32"),
        ("F16", "BF16", "float32"),
    ],
)
def test_on_a_gpu_everything_floating_has_the_type_of_the_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, matrices: str, head: str, dtype: str
) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    monkeypatch.setattr("cortexmlx.models.load._slow_below_float32", lambda: False)
    stored = tensors(matrices, tied=False) | {"output.weight": tensors(head, tied=False)["output.weight"]}
    path = write_gguf(tmp_path / "tiny.gguf", metadata(), stored)
    loaded = load_model(path)
    kinds = {a.dtype for _, a in tree_flatten(loaded.model.parameters()) if mx.issubdtype(a.dtype, mx.floating)}
    assert loaded.dtype == dtype and kinds == {getattr(mx, dtype)} and loaded.notes == ()
    assert hasattr(loaded.model.layers[0].mlp.up_proj, "scales") is matrices.startswith("Q")
    tolerance = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}[dtype]
    assert relative_error(computed(path, None), logits(values(stored), TOKENS)) < tolerance


def test_the_loaded_model_says_what_it_is(tmp_path: Path) -> None:
    loaded = load_model(write_model(tmp_path / "tiny.gguf", type_name="Q4_0"))
    stored = tensors("Q4_0")
    numbers = sum(int(np.prod(shape)) for _, shape, _ in stored.values())
    assert loaded.parameters == numbers
    assert loaded.weight_bytes == numbers * 4
    assert loaded.dtype == "float32"
    assert loaded.context_length == 512
    assert any("float32" in note for note in loaded.notes)
    assert loaded.tokenizer.eos_token_ids == {loaded.tokenizer.vocab_size - 1}


def test_dequantizing_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORTEXMLX_DEQUANTIZE", "0")
    loaded = load_model(write_model(tmp_path / "tiny.gguf", type_name="Q4_0"))
    assert hasattr(loaded.model.layers[0].mlp.up_proj, "scales")
    assert loaded.weight_bytes < loaded.parameters


def test_a_machine_with_little_memory_keeps_weights_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "tiny.gguf", type_name="Q4_0")
    parameters = load_model(path).parameters
    for memory, packed in ((parameters * 16, True), (parameters * 16 + 16, False)):
        monkeypatch.setattr("cortexmlx.models.load.memory_bytes", lambda memory=memory: memory)
        assert hasattr(load_model(path).model.layers[0].mlp.up_proj, "scales") is packed


def refused(tmp_path: Path, error: type[Exception], *words: str, **kwargs: Any) -> None:
    path = write_model(tmp_path / "tiny.gguf", **kwargs)
    with pytest.raises(error) as caught:
        load_model(path)
    for word in ("tiny.gguf", *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("type_name", "bytes_per_256"), [("Q4_K", 144), ("Q6_K", 210)])
def test_other_quantizations_are_refused_by_name(tmp_path: Path, type_name: str, bytes_per_256: int) -> None:
    stored = tensors("F32") | {"blk.1.ffn_up.weight": (type_name, (2, 256), bytes(2 * bytes_per_256))}
    path = write_gguf(tmp_path / "tiny.gguf", metadata(), stored)
    with pytest.raises(ModelUnsupported, match=f"{type_name}.*blk.1.ffn_up.*Q4_0"):
        load_model(path)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    refused(tmp_path, ModelUnsupported, "'mamba'", header=metadata("mamba"))


def test_experts_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, ModelUnsupported, "experts", header=metadata(llama__expert_count=Uint32(8)))


def test_a_part_of_a_split_model_says_how_to_join_them(tmp_path: Path) -> None:
    header = metadata() | {"split.count": Uint32(3)}
    refused(tmp_path, ModelUnsupported, "3 parts", "--merge", header=header)


def test_unknown_rope_scaling_is_refused_by_name(tmp_path: Path) -> None:
    refused(
        tmp_path,
        ModelUnsupported,
        "'longrope'",
        header=metadata(llama__rope__scaling__type="longrope", llama__rope__scaling__factor=2.0),
    )


def test_an_unknown_setting_of_rope_scaling_is_refused_by_name(tmp_path: Path) -> None:
    header = metadata(llama__rope__scaling__type="yarn", llama__rope__scaling__yarn_log_multiplier=0.1)
    refused(tmp_path, ModelUnsupported, "yarn_log_multiplier", header=header)


def test_partial_rotation_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, ModelUnsupported, "part of each head", header=metadata(llama__rope__dimension_count=Uint32(8)))


def test_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    refused(tmp_path, ModelUnsupported, "'bloom'", header=metadata(tokenizer__ggml__pre="bloom"))


def test_unknown_tokenizer_type_is_refused_by_name(tmp_path: Path) -> None:
    refused(tmp_path, ModelUnsupported, "'rwkv'", header=metadata(tokenizer__ggml__model="rwkv"))


def test_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    stored = tensors("F32") | {"blk.0.attn_sinks.weight": ("F32", (4,), bytes(16))}
    path = write_gguf(tmp_path / "tiny.gguf", metadata(), stored)
    with pytest.raises(ModelUnsupported, match="attn_sinks"):
        load_model(path)


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
        ("tokenizer.ggml.tokens", [1, 2]),
    ],
)
def test_metadata_that_contradicts_itself_is_corrupt(tmp_path: Path, key: str, value: Any) -> None:
    path = write_model(tmp_path / "tiny.gguf", header=metadata() | {key: value})
    with pytest.raises(ModelCorrupt) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_corrupt(tmp_path: Path) -> None:
    stored = tensors("F32")
    del stored["blk.1.ffn_up.weight"]
    path = write_gguf(tmp_path / "tiny.gguf", metadata(), stored)
    with pytest.raises(ModelCorrupt, match=r"blk\.1\.ffn_up"):
        load_model(path)


def test_files_without_a_word_rule_use_the_default_and_say_so(tmp_path: Path) -> None:
    loaded = load_model(write_model(tmp_path / "tiny.gguf", header=metadata(tokenizer__ggml__pre=None)))
    assert any("default rule" in note for note in loaded.notes)


def test_base_is_the_one_in_the_header(tmp_path: Path) -> None:
    header = metadata(llama__rope__freq_base=500.0)
    path = write_model(tmp_path / "tiny.gguf", header=header, type_name="F32")
    assert BASE != 500.0
    assert relative_error(computed(path), logits(values(tensors("F32")), TOKENS, base=500.0)) < 2e-5


@pytest.mark.parametrize(
    ("pre", "setting", "begins"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", None, False), ("smollm", True, True)],
)
def test_prompts_begin_as_the_file_or_else_its_family_says(
    tmp_path: Path, pre: str, setting: bool | None, begins: bool
) -> None:
    header = metadata(tokenizer__ggml__pre=pre)
    if setting is not None:
        header["tokenizer.ggml.add_bos_token"] = setting
    tokenizer = load_model(write_model(tmp_path / "tiny.gguf", header=header)).tokenizer
    assert (tokenizer.encode("hello")[0] == tokenizer.bos_token_id) is begins


def test_every_token_that_ends_a_turn_ends_a_generation(tmp_path: Path) -> None:
    header = metadata()
    count = len(header["tokenizer.ggml.tokens"])
    header |= {"tokenizer.ggml.eos_token_id": Uint32(5), "tokenizer.ggml.eot_token_id": Uint32(6)}
    loaded = load_model(write_model(tmp_path / "tiny.gguf", header=header))
    assert loaded.tokenizer.eos_token_ids == {5, 6, count - 1}  # and <|im_end|>, a control token, by its name
    assert loaded.config["eos_token_id"] == [5, 6, count - 1]
