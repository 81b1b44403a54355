"""The first tokens of a long text are those of all of it, and little of it is tokenized."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.core import embedding as module
from cortexmlx.core.embedding import LONG, first_tokens
from support.effort import examples
from support.models.sentencepieces import CORPUS, KINDS
from tests.models.tokenizers.test_least_tokens import CORES, core_of, pieces, texts

long_texts = st.tuples(
    st.lists(st.tuples(texts, st.sampled_from([1, 2, 30])), max_size=4),
    st.sampled_from(["", *CORPUS[:6], "a", "aa", "abc", "世界", " ", "\n", "<a>", "e\u0301"]),
    st.integers(0, 1500),
).map(lambda parts: "".join(text * times for text, times in parts[0]) + parts[1] * parts[2])


def check(encode: Callable[[str], list[int]], text: str, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LONG", 400)
        found = first_tokens(encode, text, most)
    whole = encode(text)
    assert found[: most + 1] == whole[: most + 1]
    assert (len(found) > most) == (len(whole) > most)


@settings(max_examples=examples(300), deadline=None)
@given(name=st.sampled_from(sorted(CORES)), text=long_texts, most=st.integers(0, 60))
def test_the_first_tokens_are_those_of_the_whole_text(name: str, text: str, most: int) -> None:
    check(lambda said: list(core_of(name).encode(said, add_special_tokens=False).ids), text, most)


@settings(max_examples=examples(300), deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), prefix_after_added=st.booleans(), text=long_texts, most=st.integers(0, 60))
def test_the_first_pieces_are_those_of_the_whole_text(
    kind: str, prefix_after_added: bool, text: str, most: int
) -> None:
    tokenizer = pieces(kind, prefix_after_added)
    check(lambda said: list(tokenizer.encode(said, add_special_tokens=False)), text, most)


@pytest.mark.parametrize("piece", ["ab c", "世界", "e\u0301"])
def test_little_of_a_long_text_is_tokenized(piece: str) -> None:
    encode, seen = core_of("bytes, composed"), 0

    def counted(text: str) -> list[int]:
        nonlocal seen
        seen += len(text)
        return list(encode.encode(text, add_special_tokens=False).ids)

    assert len(first_tokens(counted, piece * (20 * LONG // len(piece)), 100)) == 101
    assert seen < 2 * LONG


@pytest.mark.parametrize("count", [3 * LONG, 3 * LONG + 1])
def test_pieces_that_differ_are_not_taken(count: int) -> None:
    """Two letters are a token; one that is left over is the first."""

    def encode(text: str) -> list[int]:
        return [1] * (len(text) % 2) + [2] * (len(text) // 2)

    assert first_tokens(encode, "x" * count, 100)[:101] == encode("x" * count)[:101]


def test_a_tokenizer_without_words_takes_no_memory_without_bound() -> None:
    """Its first token depends on the end of the text."""
    longest = 0

    def encode(text: str) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return [len(text)] * 200

    assert len(first_tokens(encode, "x" * 100 * LONG, 100)) == 101
    assert longest <= 16 * LONG


def test_a_text_that_is_not_long_is_tokenized_as_a_whole() -> None:
    assert first_tokens(lambda text: [1] * len(text), "x" * LONG, 100) == [1] * LONG
