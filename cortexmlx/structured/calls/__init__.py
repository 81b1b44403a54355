"""How models write tool calls: the grammar and the streaming parser of each format. Without mlx."""
