"""An agent's conversation, with kills of its engine."""
