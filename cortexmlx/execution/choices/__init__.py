"""What an engine chooses when it opens."""
