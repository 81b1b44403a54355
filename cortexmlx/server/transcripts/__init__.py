"""What a server remembers of its answers, so that an agent's next turn computes only what is new.

Clients send texts back, and not tokens. A text encoded anew has other tokens than the model wrote, arguments of calls
come back in another form, and thoughts do not come back at all. So the server keeps a bounded table of transcripts for
each client, with the model's own tokens, and finds the one that a new prompt continues.
"""
