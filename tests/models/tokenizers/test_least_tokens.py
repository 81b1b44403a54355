"""The bound on a text's tokens is never above what the tokenizer makes of it, and near enough to be of use."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cortexmlx.models.tokenizers import least_tokens
from cortexmlx.models.tokenizers.base import SpecialTokens
from cortexmlx.models.tokenizers.least_tokens import bound_for_core
from cortexmlx.models.tokenizers.sentencepiece import SentencePieceTokenizer
from support.effort import THOROUGH
from support.models.sentencepieces import CORPUS, KINDS, trained

_WORDS = r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACES = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def byte_level(normalizer: Any = None, complete: bool = True, *added: AddedToken, **options: Any) -> Tokenizer:
    core = Tokenizer(models.BPE(**options))
    core.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if complete else []
    trainer = trainers.BpeTrainer(
        special_tokens=["<|end|>"], initial_alphabet=alphabet, vocab_size=420, show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_tokens(list(added))
    return core


def by_characters(normalizer: Any, cutter: Any, *added: AddedToken, bytes_too: bool = True) -> Tokenizer:
    core = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer, core.pre_tokenizer = normalizer, cutter
    special = ["<unk>", *(BYTES if bytes_too else [])]
    core.train_from_iterator(
        CORPUS, trainers.BpeTrainer(special_tokens=special, vocab_size=500, show_progress=False, max_token_length=12)
    )
    data = core.to_str()
    plain = Tokenizer.from_str(data)
    plain.add_tokens([AddedToken("<|end|>", special=True, normalized=False), *added])
    return plain


CORES: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "bytes, composed": lambda: byte_level(normalizers.NFC()),
    "bytes, some missing": lambda: byte_level(None, False),
    "bytes, some missing, unknown fused": lambda: byte_level(None, False, unk_token="<|end|>", fuse_unk=True),
    "bytes, added take spaces": lambda: byte_level(None, True, AddedToken("<a>", lstrip=True, rstrip=True)),
    "bytes, added are composed": lambda: byte_level(normalizers.NFC(), True, AddedToken("e\u0301t\u0915\u093c")),
    "bytes, case lost": lambda: byte_level(normalizers.Lowercase()),
    "bytes, ends lost": lambda: byte_level(normalizers.Strip()),
    "characters": lambda: by_characters(SPACES, None),
    "characters, added with space": lambda: by_characters(SPACES, None, AddedToken("a b", normalized=True)),
    "characters, spaces in front": lambda: by_characters(None, pre_tokenizers.Metaspace()),
    "characters, composed": lambda: by_characters(normalizers.Sequence([normalizers.NFC(), SPACES]), None),
    "characters, no bytes": lambda: by_characters(SPACES, None, bytes_too=False),
    "characters, spaces dropped": lambda: by_characters(None, pre_tokenizers.WhitespaceSplit()),
    "words": lambda: Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
}
NO_BOUND = {
    "bytes, case lost",
    "bytes, ends lost",
    "characters, no bytes",
    "characters, spaces dropped",
    "words",
}
core_of = cache(lambda name: CORES[name]())
bound_of = cache(lambda name: bound_for_core(core_of(name)))

texts = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.text("e\u0301\u0323\u0338\u212a\u1100\u1161\u11a8\u0915\u093c<>| ▁\n", max_size=12),
        st.sampled_from(["<|end|>", "<a>", "a b", "a▁b", "e\u0301t", "<0x41>", "    ", "The quick brown fox", "世界"]),
        st.sampled_from(CORPUS),
        st.sampled_from(["<a>" + " " * 400, "e\u0301" * 40]),
    ).flatmap(lambda piece: st.integers(1, 12).map(lambda times: piece * times)),
    max_size=6,
).map("".join)


@settings(max_examples=800 if THOROUGH else 40)
@given(st.sampled_from(sorted(CORES.keys() - NO_BOUND)), texts)
def test_no_text_has_fewer_tokens_than_the_bound(name: str, text: str) -> None:
    count = len(core_of(name).encode(text, add_special_tokens=False).ids)
    for chunk in (1, 40, 1 << 16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(least_tokens, "_CHUNK", chunk)
            assert bound_of(name).compute(text) <= count, f"in chunks of {chunk}"


@settings(max_examples=600 if THOROUGH else 30)
@given(st.sampled_from(sorted(KINDS)), st.booleans(), texts)
def test_no_text_has_fewer_pieces_than_the_bound(kind: str, prefix_after_added: bool, text: str) -> None:
    tokenizer = pieces(kind, prefix_after_added)
    assert tokenizer.token_lower_bound.compute(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@cache
def pieces(kind: str, prefix_after_added: bool) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(
        trained(kind), SpecialTokens(), None, {"<|end|>": 600, "a b": 601}, prefix_after_added
    )


def test_the_bound_is_of_use_where_the_tokenizer_is_understood() -> None:
    text = "".join(CORPUS) * 4
    for name in CORES:
        least = bound_of(name).compute(text)
        if name in NO_BOUND:
            assert least == 0, name
        else:
            assert least > len(core_of(name).encode(text).ids) / 8, name


def test_a_sentencepiece_model_with_rules_or_without_bytes_has_no_bound() -> None:
    text = "".join(CORPUS) * 4
    for kind in KINDS:
        tokenizer = pieces(kind, True)
        least = tokenizer.token_lower_bound.compute(text)
        if kind in ("llama", "user symbols"):
            assert least > len(tokenizer.encode(text)) / 8, kind
        else:
            assert least == 0, kind


def test_what_python_finds_composed_the_tokenizers_library_leaves_alone() -> None:
    """Each has its own tables: every character alone, and before and after one that composes with many. Beyond these
    planes no character is composed of others.
    """
    ranges = (range(0xD800), range(0xE000, 0x20000), range(0x2F800, 0x2FA20))
    every = [chr(code) for codes in ranges for code in codes]
    normalizer = normalizers.NFC()
    for form in ("{}", "e{}", "{}\u0301"):
        composed = [t for t in map(form.format, every) if unicodedata.is_normalized("NFC", t)]
        text = "\n".join(composed)
        assert normalizer.normalize_str(text) == text
