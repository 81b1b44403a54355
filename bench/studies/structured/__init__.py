"""What structured output costs, and how well it holds."""
