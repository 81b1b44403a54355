"""The cost of the commands themselves, compared with the engine alone."""
