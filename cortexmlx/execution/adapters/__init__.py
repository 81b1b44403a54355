"""Adapters per request: rows with different adapters, and with none, in one step of one model."""
