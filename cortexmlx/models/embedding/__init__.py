"""How a model makes embeddings and judges documents, as its own files say. Nothing is guessed."""
