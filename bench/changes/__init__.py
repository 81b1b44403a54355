"""One run beside an earlier one: what changed beyond the noise."""
