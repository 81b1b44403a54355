"""The laboratory: what executes, judges, compiles and costs the kernels on Linux. It is not in a wheel."""
