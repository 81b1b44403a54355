"""What an app needs around its requests: asyncio, callbacks, tokens of texts."""
