"""Comparison of a run with an earlier one: what changed beyond the noise."""
