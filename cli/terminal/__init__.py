"""What every command writes with, and how it ends."""
