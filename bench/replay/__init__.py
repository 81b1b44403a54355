"""Replay of known texts through a real model, to measure what drafts save."""
