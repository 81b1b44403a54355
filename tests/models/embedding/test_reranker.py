"""The prompts of Qwen3-Reranker, and which models are taken for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.errors import EmbeddingRefused
from cortexmlx.models.embedding import DEFAULT_INSTRUCTION, RerankerPrompt, read_reranker_prompt
from cortexmlx.models.folder import load_folder_without_weights
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from support.embedding.models import write_embedding, write_json, write_reranker

CARD = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer \
can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {instruction}
<Query>: {query}
<Document>: {document}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
"""The whole prompt of the model card."""


def encode_of(folder: Path) -> Callable[[str], list[int]]:
    tokenizer = SharedTokenizer(load_folder_without_weights(folder)[0])
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def read(folder: Path, name: str = "a model") -> RerankerPrompt:
    return read_reranker_prompt(name, folder, json.loads((folder / "config.json").read_text()), encode_of(folder))


@pytest.mark.parametrize("logit_score", [False, True])
def test_the_prompt_is_that_of_the_model_card(tmp_path: Path, logit_score: bool) -> None:
    folder = write_reranker(tmp_path / "Qwen3-Reranker-0.6B", logit_score=logit_score)
    reranker, encode = read(folder), encode_of(folder)
    said = ("what is it", "a hat")
    whole = CARD.format(instruction=DEFAULT_INSTRUCTION, query=said[0], document=said[1])
    tokens, count = reranker.encode_document(encode, DEFAULT_INSTRUCTION, *said, 10_000)
    assert tokens == encode(whole) and count == len(tokens)
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert (reranker.yes, reranker.no) == (vocab["yes"], vocab["no"])
    assert tokens[
        : len(reranker.encode_shared_prefix(encode, DEFAULT_INSTRUCTION, said[0]))
    ] == reranker.encode_shared_prefix(encode, DEFAULT_INSTRUCTION, said[0])
    assert reranker.count_fixed_tokens(encode, DEFAULT_INSTRUCTION, said[0]) == len(encode(whole)) - len(
        encode(" a hat")
    )


def test_the_end_of_a_long_document_is_cut_and_the_rest_stays(tmp_path: Path) -> None:
    folder = write_reranker(tmp_path / "qwen3-reranker")
    reranker, encode = read(folder), encode_of(folder)
    whole, count = reranker.encode_document(encode, "i", "q", "a hat " * 50, 10_000)
    cut, told = reranker.encode_document(encode, "i", "q", "a hat " * 50, 300)
    end = encode("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert len(cut) == 300 and told == count == len(whole)
    assert cut[-len(end) :] == end and cut[: -len(end)] == whole[: 300 - len(end)]


def test_a_model_is_known_by_its_name_or_by_its_files(tmp_path: Path) -> None:
    plain = write_reranker(tmp_path / "plain")
    assert read(plain, "mlx-community/Qwen3-Reranker-0.6B-4bit").yes
    assert read(write_reranker(tmp_path / "files", logit_score=True)).yes
    with pytest.raises(EmbeddingRefused, match="neither its name nor a LogitScore"):
        read(plain)
    with pytest.raises(EmbeddingRefused, match="neither its name nor a LogitScore"):
        read(write_embedding(tmp_path / "embedding-of-qwen3-reranker"))


@pytest.mark.parametrize(
    ("config", "tokens", "why"),
    [
        ({"model_type": "llama"}, {}, "it is of the type llama"),
        ({}, {"true_token_id": 5}, "its LogitScore compares the tokens 5 and"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, {}, "Qwen3ForSequenceClassification"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, config: Any, tokens: Any, why: str) -> None:
    folder = write_reranker(tmp_path, logit_score=True)
    for path, changes in ((folder / "config.json", config), (folder / "1_LogitScore" / "config.json", tokens)):
        write_json(path, json.loads(path.read_text()) | changes)
    with pytest.raises(EmbeddingRefused, match=why):
        read(folder)


def test_a_tokenizer_without_the_tags_is_refused(tmp_path: Path) -> None:
    folder = write_embedding(tmp_path / "qwen3-reranker")
    (folder / "modules.json").unlink()
    with pytest.raises(EmbeddingRefused, match=r"no single token for <\|im_start\|>, <\|im_end\|>, yes, no"):
        read(folder)
