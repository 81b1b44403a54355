"""The formats of the OpenAI API, with vLLM's additions."""
