"""How a model judges documents, as Qwen3-Reranker does it: a prompt asks whether a document fits a query, and the
logits of "yes" and "no" after it are the answer.

The format is that of the model card. Other formats of reranking are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortexmlx.errors import EmbeddingRefused
from cortexmlx.models.embedding.causal import check_causal
from cortexmlx.models.embedding.files import read_logit_score, read_modules

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

_BEGINNING = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_TAGS = ("<|im_start|>", "<|im_end|>", "yes", "no")

_NAME, _TYPE = "qwen3-reranker", "qwen3"

Encode = Callable[[str], list[int]]
"""Returns the tokens of a text without special tokens around it."""


@dataclass(frozen=True)
class Reranker:
    """How a model judges documents."""

    yes: int
    """The token for a document that fits."""
    no: int

    def tokens(self, encode: Encode, instruction: str, query: str, document: str, most: int) -> tuple[list[int], int]:
        """Return the tokens of the prompt for one document, and how many tokens its whole prompt would have. The end of
        the document is cut off beyond `most` tokens.
        """
        begin, end = encode(_BEGINNING), encode(_END)
        pair = encode(_pair(instruction, query, f" {document}"))
        room = max(most - len(begin) - len(end), 0)
        return [*begin, *pair[:room], *end], len(begin) + len(pair) + len(end)

    def shared(self, encode: Encode, instruction: str, query: str) -> list[int]:
        """Return the tokens with which the prompts for all documents begin, up to the first that may differ."""
        return [*encode(_BEGINNING), *encode(_pair(instruction, query, ""))]

    def least(self, encode: Encode, instruction: str, query: str) -> int:
        """Return how many tokens the prompt for an empty document has."""
        return len(self.shared(encode, instruction, query)) + len(encode(_END))


def read_reranker(name: str, folder: Path, config: Mapping[str, Any], encode: Encode) -> Reranker:
    """Return how the model `name` judges documents. Raises EmbeddingRefused if its files, or its name, do not say that
    it does so as Qwen3-Reranker, and ModelCorrupt if they cannot be read.
    """
    modules = read_modules(folder) if folder.is_dir() else []
    said = read_logit_score(modules)
    named = any(_NAME in part.lower() for part in (name, *folder.parts))
    if said is None and (not named or modules):
        raise EmbeddingRefused(
            f"{name} cannot judge documents: neither its name nor a LogitScore in its modules.json says that it is a "
            "Qwen3-Reranker, and a score of another model would mean nothing. Take a model such as "
            "Qwen/Qwen3-Reranker-0.6B; its folder must keep that name"
        )
    if config.get("model_type") != _TYPE:
        raise EmbeddingRefused(
            f"{name} cannot judge documents: it is of the type {config.get('model_type')}, and only the format of "
            "Qwen3-Reranker is known"
        )
    check_causal(name, config)
    tags = [encode(tag) for tag in _TAGS]
    if any(len(tokens) != 1 for tokens in tags):
        missing = ", ".join(tag for tag, tokens in zip(_TAGS, tags, strict=True) if len(tokens) != 1)
        raise EmbeddingRefused(f"{name} cannot judge documents: its tokenizer has no single token for {missing}")
    yes, no = tags[2][0], tags[3][0]
    if said is not None and (said.true_token, said.false_token) != (yes, no):
        raise EmbeddingRefused(
            f"{name} cannot judge documents: its LogitScore compares the tokens {said.true_token} and "
            f"{said.false_token}, and Qwen3-Reranker {yes} (yes) and {no} (no), so its prompts may differ, too"
        )
    return Reranker(yes, no)


def _pair(instruction: str, query: str, document: str) -> str:
    return f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>:{document}"
