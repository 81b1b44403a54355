"""What several hosts cost."""
