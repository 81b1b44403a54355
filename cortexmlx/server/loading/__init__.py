"""Which of a server's models are loaded: within one memory budget, on demand, and never at a running request's cost."""
