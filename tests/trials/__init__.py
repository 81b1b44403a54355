"""Long random trials, each run by hand: `python -m tests.trials.NAME`."""
