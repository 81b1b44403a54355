"""Trials of engines that speculate."""
