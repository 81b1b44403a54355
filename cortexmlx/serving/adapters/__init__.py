"""The adapters that requests can name."""
