"""What an engine tells of itself: measurements while it works, and its stats."""
