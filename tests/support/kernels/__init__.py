"""What tests of kernels share: problems with a float64 answer, emulators, and kernels that are broken on purpose."""
