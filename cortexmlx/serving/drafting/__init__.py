"""The draft model of an engine: a second model that guesses next tokens."""
