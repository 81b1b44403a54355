"""Engines that speculate, at length."""
