"""More than one machine: workers that each run a part of a model, and the controller that leads them."""
