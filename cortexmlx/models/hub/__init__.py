"""Models of the hub: find those on this machine, and download others."""
