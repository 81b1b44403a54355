"""Grammars of answers: compiled once, followed token by token, without mlx. llguidance does the work."""
