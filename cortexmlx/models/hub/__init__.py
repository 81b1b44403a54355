"""Models of the hub: which are here, and how the others come here."""
