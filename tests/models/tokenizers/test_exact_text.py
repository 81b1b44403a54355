"""mlx-lm's wrapper streams exactly what its tokenizer decodes; where it does so already it is left alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cortexmlx.models.tokenizers.exact_text import with_exact_text


def wrapped(kind: type) -> TokenizerWrapper:
    """A token for every byte, and two added ones; with detokenizers of `kind`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|a b|>"])
    core.add_tokens(["  "])
    plain = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    return TokenizerWrapper(plain, kind)


EXACT = with_exact_text(wrapped(BPEStreamingDetokenizer))


def streamed(wrapper: Any, ids: list[int]) -> str:
    detokenizer = wrapper.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    text: str = detokenizer.text
    return text


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


def test_other_detokenizers_stay_as_they_are() -> None:
    assert isinstance(with_exact_text(wrapped(NaiveStreamingDetokenizer)).detokenizer, NaiveStreamingDetokenizer)
