"""CannotLoad: what clients are told of a model that cannot be loaded."""

from __future__ import annotations

import math

from cortexmlx.errors import (
    CortexError,
    InvalidRequest,
    KVCacheFull,
    ModelCorrupt,
    ModelNotFound,
    ModelUnsupported,
    OutOfMemory,
)

_WHY = (
    (ModelNotFound, "its files are not there"),
    (ModelCorrupt, "its files are damaged"),
    (ModelUnsupported, "this version cannot run it"),
    (OutOfMemory, "memory was refused"),
    (KVCacheFull, "memory was refused"),
    (InvalidRequest, "it does not fit the server's options"),
)


class CannotLoad(CortexError):
    """A model cannot be loaded now. The message names it without its path: clients read it. It may be tried again after
    `seconds`.
    """

    def __init__(self, message: str, seconds: float = 1.0) -> None:
        super().__init__(message)
        self.seconds = seconds


def cannot_load(name: str, cause: BaseException, seconds: float) -> CannotLoad:
    """Return the error that clients get for what loading a model raised, and the seconds until it is tried again."""
    why = next((words for kind, words in _WHY if isinstance(cause, kind)), "see the server's log")
    again = math.ceil(seconds)
    return CannotLoad(f"the model {name!r} cannot be loaded: {why}. Ask again in {again} s", again)
