"""Files of embeddings."""
