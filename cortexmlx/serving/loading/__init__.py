"""What happens beside the loading of a model, so that the first answer does not wait for it."""
