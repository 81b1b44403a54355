"""How much memory a step takes, found out without computing it."""
