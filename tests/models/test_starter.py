"""The real starter model: its tokens and its logits, judged from the bytes of its file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.models import LoadedModel, load_model
from cortexmlx.models.gguf.file import GGUFHeader, read_gguf_header
from cortexmlx.models.resolve import starter_path
from cortexmlx.models.tokenizers.alphabet import alphabet_bytes
from support.effort import examples
from support.gguf.models import logits
from support.gguf.writer import decode

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(starter_path() is None, reason="the starter model is not installed"),
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("smollm2", dequantize=True)


@pytest.fixture(scope="module")
def header() -> GGUFHeader:
    path = starter_path()
    assert path is not None
    return read_gguf_header(path)


@pytest.fixture(scope="module")
def weights(header: GGUFHeader) -> dict[str, np.ndarray]:
    data = header.path.read_bytes()
    return {
        name: decode(data[info.offset : info.offset + info.nbytes], info.type_name, info.shape)
        for name, info in header.tensors.items()
    }


# Known ids of this vocabulary, gathered from other implementations.
KNOWN = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "\n": [198],
    "<|im_start|>user\nHi<|im_end|>": [1, 4093, 198, 26843, 2],
}


@pytest.mark.parametrize("text", KNOWN)
def test_known_texts_get_their_known_tokens(loaded: LoadedModel, text: str) -> None:
    assert loaded.tokenizer.encode(text) == KNOWN[text]


@pytest.fixture(scope="module")
def reference_tokenizer(header: GGUFHeader) -> Any:
    """The same vocabulary behind the pipeline that the model's authors publish: single digits, then words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    meta = header.metadata
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([t for t, k in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if k == 3])
    return core


BYTES_WITHOUT_TOKEN = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}


@settings(max_examples=examples(500), deadline=None)
@given(text=st.one_of(st.text(max_size=80), st.text(alphabet="aA 1½٣\n\t'st.é漢🙂<|im_end|>", max_size=60)))
def test_any_text_gets_the_tokens_of_the_published_pipeline(
    loaded: LoadedModel, reference_tokenizer: Any, text: str
) -> None:
    ids = loaded.tokenizer.encode(text)
    assert ids == reference_tokenizer.encode(text, add_special_tokens=False).ids
    assert loaded.tokenizer.decode(ids) == reference_tokenizer.decode(ids, skip_special_tokens=False)
    if not BYTES_WITHOUT_TOKEN & set(text.encode()):
        assert loaded.tokenizer.decode(ids) == text


def test_the_bytes_that_no_token_stands_for_are_rare_ones(loaded: LoadedModel) -> None:
    """This vocabulary cannot write 21 byte values; like the published pipeline, encoding leaves them out."""
    alphabet = set(loaded.tokenizer.get_vocab())
    assert {byte for char, byte in alphabet_bytes().items() if char not in alphabet} == BYTES_WITHOUT_TOKEN


def test_the_chat_template_is_the_models_own(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert ids == tokenizer.encode(text) and ids.count(1) == 3
    assert tokenizer.eos_token_ids == {0, 2}


def test_the_model_says_what_it_is(loaded: LoadedModel) -> None:
    assert loaded.parameters == 134_515_008
    assert loaded.context_length == 8192
    assert loaded.dtype == "float32" and loaded.weight_bytes == 4 * loaded.parameters
    assert loaded.tokenizer.vocab_size == 49152


PROMPT = "The three laws of motion, in 1687, were written down by"


def test_logits_are_those_of_the_bytes_in_the_file(loaded: LoadedModel, weights: dict[str, np.ndarray]) -> None:
    """float64 NumPy on the values that the file's blocks stand for, with the rotation of the file's own row order."""
    import mlx.core as mx

    tokens = loaded.tokenizer.encode(PROMPT)
    wanted = logits(weights, tokens, heads=9, kv_heads=3, base=100000.0)
    found = np.array(loaded.model(mx.array([tokens])))[0]
    assert np.abs(found - wanted).max() < 2e-3
    assert (found.argmax(-1) == wanted.argmax(-1)).all()


def test_packed_weights_give_the_same_logits(weights: dict[str, np.ndarray]) -> None:
    import mlx.core as mx

    packed = load_model("smollm2", dequantize=False)
    tolerance = 2e-3 if packed.dtype == "float32" else 0.2
    assert packed.weight_bytes < packed.parameters and hasattr(packed.model.layers[0].mlp.up_proj, "scales")
    tokens = packed.tokenizer.encode(PROMPT)[:6]
    wanted = logits(weights, tokens, heads=9, kv_heads=3, base=100000.0)
    found = np.array(packed.model(mx.array([tokens])).astype(mx.float32))[0]
    assert np.abs(found - wanted).max() < tolerance


def test_it_answers_a_question_through_mlx_lm(loaded: LoadedModel) -> None:
    from mlx_lm import stream_generate

    ids = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    text = "".join(part.text for part in stream_generate(loaded.model, loaded.tokenizer, ids, max_tokens=12))
    assert "Paris" in text
