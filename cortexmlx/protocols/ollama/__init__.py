"""Ollama's API: chat, generate, embeddings, and what it says of models. Shapes and names: ollama's docs/api.md."""
