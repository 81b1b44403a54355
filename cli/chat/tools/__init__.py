"""Functions that the model of a chat may call."""
