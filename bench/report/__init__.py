"""The report of a benchmark: for people, for programs, and as a picture."""
