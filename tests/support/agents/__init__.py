"""Conversations of agents, and how many of their tokens are computed again."""
