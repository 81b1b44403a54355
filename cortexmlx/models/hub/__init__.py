"""Models of the hub: those on this machine, and downloading the others."""
