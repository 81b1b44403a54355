"""Links: connections over sockets between the controller and its workers, and who may join. Without mlx."""
