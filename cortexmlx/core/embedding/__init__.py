"""Embeddings and scores of documents: what an opened model can do, and the calls of an engine."""
