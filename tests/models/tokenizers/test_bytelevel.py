"""Byte-level BPE from GGUF metadata, judged by a naive merge loop and the `regex` module's splits."""

from __future__ import annotations

import itertools
import unicodedata

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.errors import InvalidRequest, ModelCorrupt, ModelUnsupported
from cortexmlx.models.tokenizers.base import SpecialTokens
from cortexmlx.models.tokenizers.bytelevel import ByteLevelTokenizer, encode_without_gil, find_pre_tokenizer
from support.effort import THOROUGH, examples
from support.models.byte_tokenizers import ALPHABET, CHARS, MERGES, TOKENS, build
from support.streaming import streamed

# The rules as their models publish them.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RULES = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "smaug-bpe": [LLAMA3],
    "dbrx": [LLAMA3],
    "gpt-4o": [O200K],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
    "tekken": [TEKKEN],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2.removesuffix(r"|\s+"), r"\p{N}+", "[0-9][0-9][0-9]"],
}


def split(patterns: list[str], text: str) -> list[str]:
    words = [text] if text else []
    for pattern in patterns:
        cut = []
        for word in words:
            done = 0
            for match in regex.finditer(pattern, word):
                cut += [word[done : match.start()], match[0]]
                done = match.end()
            cut.append(word[done:])
        words = [word for word in cut if word]
    return words


def naive_encode(patterns: list[str], text: str) -> list[int]:
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(MERGES)}
    ids = {token: index for index, token in enumerate(TOKENS)}
    found = []
    for word in split(patterns, text):
        parts = [CHARS[byte] for byte in word.encode()]
        while True:
            pairs = [(ranks[p], i) for i, p in enumerate(itertools.pairwise(parts)) if p in ranks]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        found += [ids[part] for part in parts]
    return found


@settings(max_examples=1350 if THOROUGH else 90, deadline=None)
@given(st.sampled_from(sorted(RULES)), st.text(alphabet=ALPHABET, max_size=30))
def test_words_are_cut_by_the_rule_that_the_file_names(name: str, text: str) -> None:
    if name == "qwen2":
        text = unicodedata.normalize("NFC", text)
    assert BUILT[name].encode(text) == naive_encode(RULES[name], text)


BUILT = {name: build(find_pre_tokenizer(name, "a.gguf")) for name in RULES}


@settings(max_examples=examples(300), deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives_a_round_trip(text: str) -> None:
    for name in ("smollm", "llama-bpe", "default"):
        tokenizer = BUILT[name]
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert streamed(tokenizer, ids) == text


@settings(max_examples=examples(300), deadline=None)
@given(ids=st.lists(st.integers(0, len(TOKENS) + 5), max_size=20))
def test_streaming_any_ids_ends_in_the_text_of_decoding_them(ids: list[int]) -> None:
    tokenizer = BUILT["smollm"]
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_digits_are_tokens_of_their_own_in_the_smollm_rule() -> None:
    assert [BUILT["smollm"].decode(i) for i in BUILT["smollm"].encode("a 123½")][-4:] == ["1", "2", "3", "½"]


def test_special_and_user_defined_tokens_in_the_text_are_one_token() -> None:
    tokenizer = BUILT["smollm"]
    first = len(TOKENS)
    assert tokenizer.encode("a<|begin|>user made<|end|>") == [TOKENS.index("a"), first, first + 2, first + 1]
    ids = [first, TOKENS.index("a"), first + 2, first + 1]
    assert tokenizer.decode(ids) == "<|begin|>auser made<|end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "auser made"


def test_whole_words_skip_the_merges_where_the_rule_says_so() -> None:
    tokens = [*TOKENS, "hello"]
    types = [1] * len(tokens)
    for name, wanted in (("llama-bpe", [len(TOKENS)]), ("smaug-bpe", None)):
        tokenizer = ByteLevelTokenizer(tokens, MERGES, types, find_pre_tokenizer(name, "a.gguf"), SpecialTokens())
        assert tokenizer.encode("hello") == (wanted or naive_encode([LLAMA3], "hello"))


def test_qwen2_composes_characters_first() -> None:
    assert BUILT["qwen2"].encode("e\u0301") == BUILT["qwen2"].encode("é")
    assert BUILT["smollm"].encode("e\u0301") != BUILT["smollm"].encode("é")


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert BUILT["smollm"].decode([TOKENS.index("a"), 10**6, -1]) == "a"


def test_an_unknown_rule_is_refused_by_name() -> None:
    with pytest.raises(ModelUnsupported, match="'viking'"):
        find_pre_tokenizer("viking", "a.gguf")


def test_merges_outside_the_vocabulary_are_corrupt() -> None:
    with pytest.raises(ModelCorrupt, match="inconsistent"):
        ByteLevelTokenizer(TOKENS[:256], ["zz yy"], [1] * 256, find_pre_tokenizer("smollm", "a"), SpecialTokens())


def test_a_text_on_which_the_library_panics_is_refused_like_any_other(capfd: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    core = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    assert encode_without_gil(core, "aaa", False) == [0, 0, 0]
    with pytest.raises(InvalidRequest, match="the model's tokenizer gives up on this text"):
        encode_without_gil(core, "a" * 40 + "b", False)
    capfd.readouterr()  # what the library says of it
