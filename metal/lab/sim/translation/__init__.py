"""Translate the Metal text that MLX compiles to C++ for the simulator."""
