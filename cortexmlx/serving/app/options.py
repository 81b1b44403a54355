"""A constructor that takes the options of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
S = TypeVar("S")


def takes_options_of(
    config: Callable[P, object],
) -> Callable[[Callable[Concatenate[S, ...], None]], Callable[Concatenate[S, P], None]]:
    """Give a constructor the parameters of `config`, for type checkers, editors and `help`."""

    def give(init: Callable[Concatenate[S, ...], None]) -> Callable[Concatenate[S, P], None]:
        me = next(iter(inspect.signature(init).parameters.values()))
        theirs = inspect.signature(config)
        init.__signature__ = theirs.replace(  # type: ignore[attr-defined]
            parameters=[me, *theirs.parameters.values()], return_annotation=None
        )
        return init

    return give
