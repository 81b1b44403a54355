"""A planned step carried out with mlx: forward pass, logits, sampling."""
