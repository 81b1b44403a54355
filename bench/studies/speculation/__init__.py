"""What speculative drafts save, where they come from, and what they cost."""
