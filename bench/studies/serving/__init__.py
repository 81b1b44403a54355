"""Studies of the server: under load, beside another server, and what a step costs it."""
