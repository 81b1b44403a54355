"""`cortexmlx serve`: an engine for programs that speak the OpenAI API, Anthropic's or Ollama's."""
