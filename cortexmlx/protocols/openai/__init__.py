"""The formats of the OpenAI API, with what vLLM adds to them."""
