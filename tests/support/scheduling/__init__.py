"""What tests of the scheduler share: a machine of numbers that carries out its plans, made-up histories, and clocks."""
