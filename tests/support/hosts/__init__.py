"""Groups of hosts for tests: workers in this process, in other processes, and over MPI."""
