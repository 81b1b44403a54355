"""Embeddings and scores of documents as plain data: what is asked of a prompt's states, and what callers get."""

from __future__ import annotations

from cortexmlx.embedding.pooled import Pooled
from cortexmlx.embedding.results import EmbeddingInfo, Embeddings, Reranking

__all__ = ["EmbeddingInfo", "Embeddings", "Pooled", "Reranking"]
