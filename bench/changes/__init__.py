"""Compares a benchmark run with an earlier one: what changed beyond the noise."""
