"""Replays known texts through a real model, to measure what speculative drafts save."""
