"""Conversations: what was said, the tokens that it is for the model, and the file in which it waits."""
