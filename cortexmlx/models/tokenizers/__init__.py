"""Tokenizers, exact detokenizing and chat templates."""
