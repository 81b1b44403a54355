"""Groups of processes, started as a user starts them."""
