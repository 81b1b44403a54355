"""Faults injected into the workers of an engine, at length."""
