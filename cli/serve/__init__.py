"""`cortexmlx serve`: an engine for programs that speak the OpenAI API or Anthropic's."""
