"""What tests of the engine share: a core without threads, clients, and what answers are compared with."""
