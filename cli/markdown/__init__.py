"""Markdown for terminals, printed while it is being written."""
