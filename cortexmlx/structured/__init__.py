"""The form of answers: grammars, tools and their calls."""
