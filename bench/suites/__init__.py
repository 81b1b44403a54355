"""What `cortexmlx bench` can measure, a module for each part."""
