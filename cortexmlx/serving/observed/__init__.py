"""What an engine reports: measurements while it works, and its stats."""
