"""`cortexmlx bench`."""
