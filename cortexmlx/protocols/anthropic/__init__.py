"""The formats of Anthropic's Messages API."""
