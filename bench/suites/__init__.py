"""What `cortexmlx bench` can measure, one module for each suite."""
