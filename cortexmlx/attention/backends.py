"""Which backend carries out `paged_attention`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from cortexmlx.attention import reference
from cortexmlx.errors import InvalidRequest


@dataclass(frozen=True)
class Backend:
    """A named implementation of `paged_attention`."""

    name: str
    attend: Callable[..., mx.array]


def choose_backend(name: str) -> Backend:
    """The backend called `name`; "auto" picks for this machine. Raises InvalidRequest for a name that is none."""
    if name in ("auto", "reference"):
        return Backend("reference", reference.attend)
    raise InvalidRequest(f"attention is {name!r}, but must be auto or reference")
