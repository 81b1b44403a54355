"""GGUF files become mlx-lm models that compute what the file says, by float64 NumPy from the file's own bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models import load_model
from cortexmlx.models.gguf.file import read_gguf_header
from support.gguf.export import export, tiny
from support.gguf.models import BASE, HEAD_DIM, logits, metadata, tensors, values, write_model
from support.gguf.writer import Uint32, decode, encode, write_gguf
from support.patience import PATIENCE

TOKENS = [5, 250, 17, 17, 99, 3, 140, 261, 0, 42, 8, 200]

pytestmark = pytest.mark.usefixtures("a_linux_cpu")


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


def test_rope_factors_stretch_the_wavelengths(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2)
    stored = tensors("F32") | {"rope_freqs.weight": ("F32", (HEAD_DIM // 2,), encode(factors, "F32"))}
    path = write_gguf(tmp_path / "tiny.gguf", metadata(), stored)
    plain, stretched = (logits(values(tensors("F32")), TOKENS, stretch=s) for s in (1.0, factors))
    assert relative_error(plain, stretched) > 1e-2, "the factors must matter for this test to say anything"
    assert relative_error(computed(path), stretched) < 2e-5


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (("Q8_0", (1, 32), bytes(34)), r"shape \(1, 32\)"),
        (("F32", (8,), bytes(32)), "no positive number"),
        (("F32", (8,), b"\xff" * 32), "no positive number"),
    ],
)
def test_rope_factors_that_are_none_are_corrupt(
    tmp_path: Path, tensor: tuple[str, tuple[int, ...], bytes], word: str
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", metadata(), tensors("F32") | {"rope_freqs.weight": tensor})
    with pytest.raises(ModelCorrupt, match=word):
        load_model(path)


@pytest.mark.parametrize(
    ("settings", "computes"),
    [
        ({"scaling__type": "linear", "scaling__factor": 4.0}, {"stretch": 4.0}),
        ({"scaling__factor": 4.0}, {"stretch": 4.0}),
        ({"freq_base": 500.0}, {"base": 500.0}),
    ],
    ids=["linear", "a factor without a kind", "another base"],
)
def test_positions_are_those_of_the_header(tmp_path: Path, settings: dict[str, Any], computes: dict[str, Any]) -> None:
    header = metadata(**{f"llama__rope__{name}": value for name, value in settings.items()})
    path = write_model(tmp_path / "tiny.gguf", header=header, type_name="F32")
    assert relative_error(computed(path), logits(values(tensors("F32")), TOKENS, **computes)) < 2e-5 and BASE != 500.0


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

    monkeypatch.setattr("cortexmlx.models.load._is_float32_faster", lambda: False)
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


def test_other_quantizations_are_refused_by_name_and_number(tmp_path: Path) -> None:
    stored = tensors("F32") | {f"blk.{i}.ffn_up.weight": ("IQ4_XS", (2, 256), bytes(272)) for i in (0, 1)}
    path = write_gguf(tmp_path / "tiny.gguf", metadata(), stored)
    with pytest.raises(ModelUnsupported, match=r"2 of type IQ4_XS.*blk.0.ffn_up.*Q4_K_M"):
        load_model(path)


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.attn_q.bias"])
def test_what_is_no_matrix_is_not_quantized(tmp_path: Path, name: str) -> None:
    stored = tensors("F32", bias=True) | {name: ("Q8_0", (64,), bytes(68))}
    with pytest.raises(ModelUnsupported, match=name):
        load_model(write_gguf(tmp_path / "tiny.gguf", metadata(), stored))


DAMAGE = """
import random, sys
from pathlib import Path
from cortexmlx.errors import CortexError
from cortexmlx.models import load_model

whole, path = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
rng, seen = random.Random(1), {}
for _ in range(int(sys.argv[3])):
    content = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 5))):
        content[rng.randrange(int(sys.argv[4]))] = rng.randrange(256)
    path.write_bytes(content)
    try:
        load_model(path)
        name = "loaded"
    except CortexError as error:
        assert chr(10) not in str(error), str(error)
        name = type(error).__name__
    seen[name] = seen.get(name, 0) + 1
print(seen)
"""


@pytest.mark.parametrize(
    ("name", "rounds"),
    [("llama", 60), *(pytest.param(name, 1000, marks=pytest.mark.slow) for name in tiny())],
)
def test_loading_a_damaged_file_never_crashes_the_process(tmp_path: Path, name: str, rounds: int) -> None:
    """In a process of its own, because a crash in native code would take the test run with it."""
    path = tmp_path / "whole.gguf"
    export(path, tiny()[name], lambda tensor: "MXFP4" if "down" in tensor else "Q5_1")
    header_bytes = min(info.offset for info in read_gguf_header(path).tensors.values())
    done = subprocess.run(
        [sys.executable, "-c", DAMAGE, str(path), str(tmp_path / "damaged.gguf"), str(rounds), str(header_bytes)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ModelCorrupt" in done.stdout and "loaded" in done.stdout
