"""Answers of engines with several adapters, compared at length with those of engines with one."""
