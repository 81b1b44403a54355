"""Predict the memory of a step without computing it."""
