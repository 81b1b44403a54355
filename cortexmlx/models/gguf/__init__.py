"""GGUF files: header, configuration, names and layout of tensors, tokenizer."""
