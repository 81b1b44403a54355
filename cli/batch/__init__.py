"""Batch files."""
