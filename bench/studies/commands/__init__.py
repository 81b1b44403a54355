"""What the commands themselves cost, beside the engine under them."""
