"""What LoRA adapters per request cost, and what they save."""
