"""Embedding models for tests, and their judge."""
