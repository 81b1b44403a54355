"""The form that an answer must have, as plain data: what a caller may ask for, and what an answer then means."""
