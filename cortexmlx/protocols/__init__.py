"""Other people's formats: a protocol's reader makes a `Request` of a body, its writer makes bodies of the answers.

`openai/` has the OpenAI API; a protocol of somebody else gets a folder beside it. `simple.py` is our own JSON, and
`batch.py` has the lines and records of batch files in all of them. Nothing here imports mlx.
"""
