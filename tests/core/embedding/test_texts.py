"""Texts as tokens, with prompts and special tokens around them, and which states count."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.core.embedding import LONG, EmbeddingTokenizer
from cortexmlx.errors import EmbeddingRefused
from cortexmlx.models.embedding import read_embedding_settings
from cortexmlx.models.folder import load_folder_without_weights
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.types.embeddings import PoolingSpec
from support.embedding.models import INSTRUCTION, put_end_token, write_embedding

END = 257


def reader(folder: Path, prompt: str | None = None, truncate: bool = False, most: int = 500) -> EmbeddingTokenizer:
    files = read_embedding_settings("a model", folder, json.loads((folder / "config.json").read_text()))
    return EmbeddingTokenizer(
        SharedTokenizer(load_folder_without_weights(folder)[0]), files, files.to_info(most), 320, prompt, truncate, "no"
    )


def plain(folder: Path, text: str) -> list[int]:
    return SharedTokenizer(load_folder_without_weights(folder)[0]).encode(text, add_special_tokens=False)


def test_prompt_and_text_are_one_text_without_blanks_around_it(tmp_path: Path) -> None:
    write_embedding(tmp_path, prompts={"p": "  read: "})
    one = reader(tmp_path, "p").tokenize(0, "  a hat \n")
    assert list(one.tokens) == [*plain(tmp_path, "read:   a hat"), END]
    assert one.pooling_spec.shared == len(plain(tmp_path, "read: "))
    assert reader(tmp_path, "p").tokenize(0, "").tokens == (*plain(tmp_path, "read:"), END)


def test_lower_case(tmp_path: Path) -> None:
    write_embedding(tmp_path, prompts={"p": "READ "}, lowercase=True)
    assert reader(tmp_path, "p").tokenize(0, "A HAT").tokens == (*plain(tmp_path, "read a hat"), END)


@pytest.mark.parametrize(
    ("pooling", "include", "pooled", "divisor", "computed"),
    [
        ("lasttoken", True, PoolingSpec(9, shared=6), 1, 10),
        ("cls", True, PoolingSpec(0), 1, 1),
        ("cls", False, PoolingSpec(6, shared=6), 1, 7),
        ("mean", True, PoolingSpec(0), 10, 10),
        ("mean", False, PoolingSpec(6, shared=6), 4, 10),
        ("mean_sqrt_len_tokens", False, PoolingSpec(6, shared=6), 2, 10),
        ("weightedmean", True, PoolingSpec(0, True), 55, 10),
        ("weightedmean", False, PoolingSpec(6, True, shared=6), 7 + 8 + 9 + 10, 10),
    ],
)
def test_which_states_count(
    tmp_path: Path, pooling: str, include: bool, pooled: PoolingSpec, divisor: float, computed: int
) -> None:
    write_embedding(tmp_path, prompts={"p": "123456"}, pooling=pooling, include_prompt=include)
    one = reader(tmp_path, "p").tokenize(0, "xyz")
    assert one.pooling_spec == pooled and one.divisor == divisor
    assert len(one.tokens) == computed and one.count == 10 and not one.is_truncated


def test_a_cut_text_keeps_its_special_tokens(tmp_path: Path) -> None:
    write_embedding(tmp_path)
    read = reader(tmp_path, truncate=True, most=4)
    one = read.tokenize(0, "12345678")
    assert one.tokens == (*plain(tmp_path, "123"), END) and one.is_truncated and one.count == 4
    assert read.tokenize(0, [1, 2, 3, 4, 5]).tokens == (1, 2, 3, 4)
    assert not read.tokenize(0, "123").is_truncated


@pytest.mark.parametrize("lowercase", [True, False])
def test_of_a_long_text_only_the_beginning_is_tokenized(
    tmp_path: Path, lowercase: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_embedding(tmp_path, prompts={"p": "READ "}, lowercase=lowercase)
    lengths, encode = [], SharedTokenizer.encode

    def noted(self: SharedTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special_tokens)

    short, text = " A hat." * 100, " A hat." * 300_000
    cut, refusing = reader(tmp_path, "p", truncate=True, most=90), reader(tmp_path, "p", most=90)
    wanted = cut.tokenize(0, short)
    monkeypatch.setattr(SharedTokenizer, "encode", noted)
    assert cut.tokenize(0, text) == wanted and wanted.is_truncated and wanted.count == 90
    with pytest.raises(EmbeddingRefused, match=r"text 5 has at least 9\d tokens, and no: shorten it"):
        refusing.tokenize(5, text)
    assert max(lengths) <= LONG


def test_a_prompt_alone_can_be_pooled_only_if_it_counts(tmp_path: Path) -> None:
    write_embedding(tmp_path, prompts={"p": "123456"}, pooling="mean", include_prompt=False, end_token=False)
    with pytest.raises(EmbeddingRefused, match="text 7 has no tokens beside its prompt"):
        reader(tmp_path, "p").tokenize(7, "")


def test_a_tokenizer_without_end_tokens_adds_none(tmp_path: Path) -> None:
    write_embedding(tmp_path, end_token=False)
    assert reader(tmp_path).tokenize(0, "abc").tokens == tuple(plain(tmp_path, "abc"))
    with pytest.raises(EmbeddingRefused, match="text 3 is empty, and has no vector"):
        reader(tmp_path).tokenize(3, " \n ")


def test_begin_tokens_are_found_too(tmp_path: Path) -> None:
    write_embedding(tmp_path, end_token=False)
    put_end_token(tmp_path)
    path = tmp_path / "tokenizer.json"
    said = json.loads(path.read_text())
    said["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<s>", "type_id": 0}})
    said["post_processor"]["special_tokens"]["<s>"] = {"id": "<s>", "ids": [256], "tokens": ["<s>"]}
    path.write_text(json.dumps(said))
    one = reader(tmp_path, truncate=True, most=4).tokenize(0, "abcdef")
    assert one.tokens == (256, *plain(tmp_path, "ab"), END)


@pytest.mark.parametrize("text", [5, None, b"a", {"a": 1}, [1.5], [True], [-1], [320], ["a"], [[1]]])
def test_what_is_no_text_is_refused(tmp_path: Path, text: Any) -> None:
    write_embedding(tmp_path)
    with pytest.raises(EmbeddingRefused, match="text 4 is no text, and no list of token ids below 320"):
        reader(tmp_path).tokenize(4, text)


def test_unknown_prompts_are_refused_with_those_that_there_are(tmp_path: Path) -> None:
    write_embedding(tmp_path / "two")
    with pytest.raises(EmbeddingRefused, match="no prompt 'queries': its files name 'document', 'query'"):
        reader(tmp_path / "two", "queries")
    with pytest.raises(EmbeddingRefused, match=r"no prompt \['query'\]: its files"):
        reader(tmp_path / "two", ["query"])  # type: ignore[arg-type]
    write_embedding(tmp_path / "none", prompts={})
    with pytest.raises(EmbeddingRefused, match="no prompt 'query': its files name none"):
        reader(tmp_path / "none", "query")


def test_what_texts_share_is_the_instruction(tmp_path: Path) -> None:
    write_embedding(tmp_path)
    texts: list[str | Sequence[int]] = ["a hat", "b", "Instruct", [1, 2, 3]]
    shared = [reader(tmp_path, "query").tokenize(0, text).pooling_spec.shared for text in texts[:3]]
    assert shared == [len(plain(tmp_path, INSTRUCTION))] * 3
    assert [reader(tmp_path).tokenize(0, text).pooling_spec.shared for text in texts] == [0] * 4


def test_token_ids_have_no_prompt_that_could_be_left_out(tmp_path: Path) -> None:
    write_embedding(tmp_path, prompts={"p": "123456"}, default_prompt="p", pooling="mean", include_prompt=False)
    ids = list(range(10, 18))
    one = reader(tmp_path).tokenize(0, ids)
    assert (list(one.tokens), one.pooling_spec, one.divisor) == (ids, PoolingSpec(0), 8)
    assert reader(tmp_path).tokenize(0, [5]).pooling_spec == PoolingSpec(0)


def test_blanks_at_the_end_of_a_prompt_belong_to_the_text(tmp_path: Path) -> None:
    """sentence-transformers measures the prompt without them: often they are part of the first word's token."""
    write_embedding(tmp_path, prompts={"p": " query: "}, pooling="mean", include_prompt=False)
    one = reader(tmp_path, "p").tokenize(0, "xyz")
    assert list(one.tokens) == [*plain(tmp_path, "query: xyz"), END]
    assert one.pooling_spec == PoolingSpec(6, shared=6) and one.divisor == 5
