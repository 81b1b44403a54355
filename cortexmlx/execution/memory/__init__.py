"""The memory that steps work on: arena, tail and recurrent states, and their way to the tier below."""
