"""How every command writes, and how it ends."""
