"""What running a model on several hosts costs."""
