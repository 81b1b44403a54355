"""Ranks that run their part of a model in processes of their own, without a controller."""
