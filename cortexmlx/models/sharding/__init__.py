"""One rank's part of a model: how a class can be cut, what cannot be cut, and loading no more than the part."""
