"""Faults planted into the kernels and their host code, to see that the tests notice each: `python -m tests.faults`."""
