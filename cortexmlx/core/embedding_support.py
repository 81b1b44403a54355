"""Whether an opened model can embed texts and rerank documents, and how; or why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cortexmlx.errors import EmbeddingRefused, ModelCorrupt
from cortexmlx.execution.boundary import Runner
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.kv.spec import GroupCounts, LayerGroup
from cortexmlx.models.embedding import EmbeddingSettings, RerankerPrompt, read_embedding_settings, read_reranker_prompt
from cortexmlx.models.loaded import LoadedModel
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.types.embeddings import EmbeddingInfo

T = TypeVar("T")

SHARE = 2
"""Texts without an answer get one part in so many of the KV memory, in which nothing is kept for chats."""


@dataclass(frozen=True)
class EmbeddingSupport:
    """Whether and how a model embeds and reranks. In each layer group, `spare_blocks` blocks are kept free for that."""

    files: EmbeddingSettings | None
    not_embedding: str
    """Why it embeds nothing, if `files` is None."""
    reranker: RerankerPrompt | None
    not_reranking: str
    """Why it judges nothing, if `reranker` is None."""
    max_tokens: int = 0
    """Tokens that a text may have."""
    spare_blocks: int = 0
    capacity_tokens: int = 0
    """Tokens of a text that the KV memory has room for."""

    @property
    def info(self) -> EmbeddingInfo | None:
        """What callers see of the model's embeddings; None if it makes none."""
        return None if self.files is None else self.files.to_info(self.max_tokens)

    def limit_reason(self, max_tokens: int) -> str:
        """Return why texts may have at most `max_tokens` tokens, in words, for errors."""
        if max_tokens == self.capacity_tokens:
            return f"the KV memory has room for {max_tokens} (texts get half of it: raise kv_memory)"
        return f"the model takes {max_tokens}"

    def spare_blocks_per_group(self, blocks: GroupCounts) -> GroupCounts:
        """Return how many of each group's `blocks` are kept spare for embedding, `spare_blocks` at most."""
        return tuple(min(self.spare_blocks, count // SHARE) for count in blocks)


def no_support(reason: str) -> EmbeddingSupport:
    """Return the EmbeddingSupport of a model that can neither embed nor rerank, because of `reason`."""
    return EmbeddingSupport(None, reason, None, reason)


def detect_support(
    loaded: LoadedModel,
    runner: Runner,
    groups: Sequence[LayerGroup],
    blocks: GroupCounts,
    block_size: int,
    max_request_tokens: int | None,
) -> EmbeddingSupport:
    """Return whether and how an opened model embeds and reranks. `blocks` are those that each layer group may have."""
    name, folder, config = loaded.name, loaded.path, loaded.config

    def encode(text: str) -> list[int]:
        return SharedTokenizer(loaded.tokenizer).encode(text, add_special_tokens=False)

    files, not_embedding = _value_or_reason(lambda: read_embedding_settings(name, folder, config))
    reranker, not_reranking = _value_or_reason(lambda: read_reranker_prompt(name, folder, config, encode))
    if files is None and reranker is None:
        return EmbeddingSupport(None, not_embedding, None, not_reranking)
    if reason := _unsupported_reason(name, runner, groups):
        return no_support(reason)
    assert isinstance(runner, ModelRunner)
    if files is not None and not runner.has_hidden_states():
        files = None
        not_embedding = (
            f"{name} cannot be embedded with: mlx-lm's class for {config.get('model_type')} does not end its body with "
            "a norm, so its last hidden states are not known"
        )
    capacity_tokens = min(count // SHARE * block_size for count in blocks)
    max_tokens = min(capacity_tokens, loaded.context_length, max_request_tokens or capacity_tokens)
    longest_text_tokens = (
        max_tokens
        if files is None or files.max_tokens is None or reranker is not None
        else min(max_tokens, files.max_tokens)
    )
    return EmbeddingSupport(
        files,
        not_embedding,
        reranker,
        not_reranking,
        max_tokens,
        -(-longest_text_tokens // block_size),
        capacity_tokens,
    )


def _unsupported_reason(name: str, runner: Runner, groups: Sequence[LayerGroup]) -> str:
    """Return why the model's layers allow neither embedding nor reranking; "" if they do."""
    reason = ""
    if not isinstance(runner, ModelRunner):
        reason = "it runs on mlx-lm's own caches, one text at a time"
    elif any(group.spec.row_bytes for group in groups):
        reason = "it has recurrent layers"
    elif any(group.spec.window is not None for group in groups):
        reason = "it has layers that see a window of the text"
    return (
        reason and f"{name} cannot embed or judge texts: {reason}, and this engine does that with full attention only"
    )


def _value_or_reason(read: Callable[[], T]) -> tuple[T | None, str]:
    """Call `read`. Return its result and "", or, if it raises, None and the error's message."""
    try:
        return read(), ""
    except (EmbeddingRefused, ModelCorrupt) as error:
        return None, str(error)
