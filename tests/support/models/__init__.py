"""Models, tokenizers and checkpoints that tests make for themselves."""
