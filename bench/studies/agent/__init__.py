"""An agent's conversation, its engine killed on the way."""
