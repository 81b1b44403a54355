"""mlx-lm's wrapper streams exactly what its tokenizer decodes; where it does so already it is left alone."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    StreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cortexmlx.models.tokenizers.detokenize import ByteDetokenizer
from cortexmlx.models.tokenizers.folder import use_exact_detokenizer
from support.streaming import streamed


def wrapped(kind: Any, core: Tokenizer | None = None) -> TokenizerWrapper:
    """The library's tokenizer, by default one of bytes, with detokenizers of `kind`."""
    plain = PreTrainedTokenizerFast(tokenizer_object=core or of_bytes(), clean_up_tokenization_spaces=False)
    return TokenizerWrapper(plain, kind)


def of_bytes() -> Tokenizer:
    """A token for every byte, and two added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|a b|>"])
    core.add_tokens(["  "])
    return core


EXACT = use_exact_detokenizer(wrapped(BPEStreamingDetokenizer))


@given(st.lists(st.integers(0, 257), max_size=20))
def test_any_ids_stream_to_what_the_tokenizer_decodes(ids: list[int]) -> None:
    assert streamed(EXACT, ids) == EXACT.decode(ids)


@pytest.mark.parametrize("text", [" a", "  a", "\0", "a\n "])
def test_what_the_detokenizer_of_mlx_lm_changes_stays(text: str) -> None:
    assert streamed(EXACT, EXACT.encode(text)) == text


def test_every_request_gets_a_detokenizer_of_its_own() -> None:
    first, second = EXACT.detokenizer, EXACT.detokenizer
    first.add_token(EXACT.encode("a")[0])
    assert (first.text, second.text) == ("a", "")


def test_detokenizers_of_other_kinds_stay_as_they_are() -> None:
    class Own(StreamingDetokenizer):
        def __init__(self, tokenizer: Any) -> None: ...

        def reset(self) -> None: ...

        def add_token(self, token: int) -> None: ...

        def finalize(self) -> None: ...

    core = word_pieces()
    assert isinstance(use_exact_detokenizer(wrapped(Own, core)).detokenizer, Own)


def pieces(leading: bool) -> Tokenizer:
    """As converted from sentencepiece: U+2581 for spaces, a token for every byte, with a space in front or without."""
    words = ["\u2581", "a", "b", "\u2581a", "\u2581\u2581", "\u2581ab", "\n", "\u00e9", "\u2581<"]
    vocab = {token: i for i, token in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "\u2581")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if leading else spaces
    strip = [decoders.Strip(" ", 1, 0)] if leading else []
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    core.add_special_tokens(["<s>", "<|a b|>"])
    return core


def words() -> Tokenizer:
    scores = [("<unk>", 0.0), ("\u2581", -1.0), ("\u2581a", -1.0), ("\u2581b", -1.0)]
    core = Tokenizer(models.Unigram([*scores, ("a", -2.0), ("b", -2.0), ("\n", -2.0), (",", -2.0)], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return core


def word_pieces() -> Tokenizer:
    vocab = ["[UNK]", "a", "##b", "##c", "b", ",", ".", "'", "s", "n", "t", "\n", "do"]
    core = Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocab)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    return core


def made(core: Tokenizer, kind: Any) -> TokenizerWrapper:
    return use_exact_detokenizer(wrapped(kind, core))  # type: ignore[no-any-return]


PIECES = {
    leading: made(pieces(leading), partial(SPMStreamingDetokenizer, trim_space=leading)) for leading in (True, False)
}
OTHERS = {core.__name__: made(core(), NaiveStreamingDetokenizer) for core in (words, word_pieces)}


@pytest.mark.parametrize("leading", [True, False])
@given(texts=st.lists(st.text("ab \n\u00e9\u6f22\U0001f642<"), max_size=3))
def test_sentencepieces_texts_stream_to_what_the_tokenizer_decodes(leading: bool, texts: list[str]) -> None:
    wrapper = PIECES[leading]
    special = wrapper.encode("<|a b|>")[-1]
    ids = [token for text in texts for token in (*wrapper.encode(text), special)]
    assert streamed(wrapper, ids) == wrapper.decode(ids)


def test_ids_that_a_padded_embedding_can_produce_have_no_text() -> None:
    wrapper = PIECES[True]
    assert streamed(wrapper, [wrapper.vocab_size + 3, *wrapper.encode("ab"), 10**6]) == "ab"


@pytest.mark.parametrize("name", list(OTHERS))
@given(data=st.data())
def test_ids_of_any_other_kind_stream_to_what_the_tokenizer_decodes(name: str, data: st.DataObject) -> None:
    wrapper = OTHERS[name]
    ids = data.draw(st.lists(st.integers(0, len(wrapper) - 1), max_size=12))
    detokenizer, parts = wrapper.detokenizer, []
    for token in ids:
        detokenizer.add_token(token)
        parts.append(detokenizer.last_segment)
    detokenizer.finalize()
    assert "".join([*parts, detokenizer.last_segment]) == wrapper.decode(ids)


def test_byte_level_tokens_are_known_by_how_text_is_cut() -> None:
    """Some files have the decoder of another vocabulary, or none, and a folder of vocabulary and merges has no file."""
    text = " Hello!  caf\u00e9\n  a\u6f22\0"
    own = decoders.ByteLevel()
    for decoder in (own, pieces(True).decoder, pieces(False).decoder, decoders.Metaspace(), decoders.Fuse(), None):
        core = of_bytes() if decoder is not None else without_decoder(of_bytes())
        if decoder is not None:
            core.decoder = decoder
        for kind in (NaiveStreamingDetokenizer, SPMStreamingDetokenizer):
            wrapper = made(core, kind)
            assert isinstance(wrapper.detokenizer, ByteDetokenizer)
            assert streamed(wrapper, wrapper.encode(text)) == text


def without_decoder(core: Tokenizer) -> Tokenizer:
    return Tokenizer.from_str(json.dumps({**json.loads(core.to_str()), "decoder": None}))


@pytest.mark.parametrize("leading", [True, False])
def test_pieces_are_known_by_how_spaces_are_written(leading: bool) -> None:
    core, text = pieces(leading), "a ab  <b\u00e9 \u6f22\n a"
    core.decoder = decoders.ByteLevel()
    for each, kind in ((core, BPEStreamingDetokenizer), (without_decoder(core), NaiveStreamingDetokenizer)):
        wrapper = made(each, kind)
        assert streamed(wrapper, wrapper.encode(text)) == text
