"""Fine-tuned adapters (LoRA, DoRA, or whole layers) on top of a model: read and checked, then applied."""
