"""The machine, its folders and files, and waits that signals end."""
