"""Conversations of agents at length: what each request computes again."""
