"""Folders with `tokenizer.model`, and GGUF vocabularies of that type, tokenize exactly as sentencepiece itself does."""

from __future__ import annotations

from functools import lru_cache

from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.models.tokenizers.base import SpecialTokens
from cortexmlx.models.tokenizers.sentencepiece import SentencePieceTokenizer
from support.effort import THOROUGH
from support.models.sentencepieces import KINDS, TEXTS, judge, trained


@lru_cache
def ours(kind: str) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(trained(kind), SpecialTokens())


def streamed(tokenizer: SentencePieceTokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer
    seen = ""
    for token in ids:
        detokenizer.add_token(token)
        seen += detokenizer.last_segment
    detokenizer.finalize()
    seen += detokenizer.last_segment
    assert detokenizer.text == seen
    return seen


@settings(max_examples=900 if THOROUGH else 60, deadline=None)
@given(st.sampled_from(sorted(KINDS)), TEXTS)
def test_text_gets_the_tokens_of_sentencepiece_and_decodes_as_there(kind: str, text: str) -> None:
    wanted = judge(kind).encode(text)
    assert ours(kind).encode(text) == wanted
    assert ours(kind).decode(wanted) == judge(kind).decode(wanted)


@lru_cache
def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Ids of which many begin a word."""
    core = judge(kind)
    marked = [i for i in range(core.vocab_size()) if core.id_to_piece(i).startswith("▁")]
    others = [i for i in range(core.vocab_size()) if not core.is_control(i)]
    return st.lists(st.one_of(st.sampled_from(others), st.sampled_from(marked)), max_size=12)


@settings(max_examples=1800 if THOROUGH else 90, deadline=None)
@given(st.sampled_from(sorted(KINDS)).flatmap(lambda kind: st.tuples(st.just(kind), ids_of(kind))))
def test_any_ids_decode_and_stream_as_sentencepiece_decodes_them(drawn: tuple[str, list[int]]) -> None:
    kind, ids = drawn
    wanted = judge(kind).decode(ids)
    assert ours(kind).decode(ids) == wanted
    assert streamed(ours(kind), ids) == wanted


def test_control_tokens_are_written_out_or_skipped() -> None:
    tokenizer, core = ours("llama"), judge("llama")
    ids = [core.bos_id(), *core.encode("Hello world"), core.eos_id()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == core.decode(ids) == "Hello world"
    assert tokenizer.decode(ids) == "<s>Hello world</s>"
    assert streamed(tokenizer, ids) == "<s>Hello world</s>"


def test_half_a_character_is_never_shown() -> None:
    tokenizer, core = ours("llama"), judge("llama")
    detokenizer = tokenizer.detokenizer
    shown = []
    for token in [core.piece_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()] + core.encode("a"):
        detokenizer.add_token(token)
        shown.append(detokenizer.last_segment)
    assert shown[:4] == ["", "", "", "🙂"]
