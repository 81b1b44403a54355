"""NotCopyable: objects that belong to one process and are neither copied nor pickled."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


class NotCopyable:
    """Belongs to the process that made it. A copy would share a thread and its queues, and end what the other uses."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """What copying and pickling ask for, and so whatever sends it to another process. Raises TypeError."""
        raise TypeError(
            f"{type(self).__name__} objects cannot be copied, pickled or sent to another process: they belong to the "
            "process that made them. Make an Engine in the other one, from the model's name"
        )
