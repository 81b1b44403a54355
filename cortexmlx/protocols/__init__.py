"""Formats of requests and replies. A protocol's reader turns a body into a `Request`, its writer turns answers into
bodies.

`openai/` has the OpenAI API, `anthropic/` Anthropic's Messages API. `simple.py` is our own JSON, and
`batch.py` has the lines and records of batch files in all protocols. Nothing here imports mlx.
"""
