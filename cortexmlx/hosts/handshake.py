"""How the controller and a worker prove to each other that they know the group's key, and compare what they run.
Without mlx, sockets or clocks.
"""

from __future__ import annotations

KEY_BYTES = 32


def new_key() -> bytes:
    """A key for one group: 32 random bytes. Give it to workers by environment or file; never log it."""
    ...
