"""What a benchmark found, for people, for programs, and beside what another run found."""
