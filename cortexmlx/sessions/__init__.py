"""Conversations: their turns, their tokens, and their files."""
