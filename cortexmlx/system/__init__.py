"""The machine, its folders and files, and waits that a signal can interrupt."""
