"""The disk tier: KV blocks in files, for prompts after an eviction or a restart."""
