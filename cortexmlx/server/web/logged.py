"""Logged: a request that was answered, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cortexmlx.types.request import Completion

TOKENS = "cortexmlx.tokens"
"""The tokens of a request's answers, in its scope."""

MODEL = "cortexmlx.model"
"""The name of the model that answers, in the scope of a request."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of one request."""

    prompt: int
    cached: int
    answer: int


@dataclass(frozen=True)
class Logged:
    """A request that was answered."""

    method: str
    path: str
    status: int
    """499: the client went away before the answer."""
    seconds: float
    tokens: Tokens | None
    model: str | None = None
    """The model that answered; None: none was asked."""


def path_in(scope: Mapping[str, Any]) -> str:
    """Return the path of a request inside the application, which may be mounted in another one."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def tokens_of(completions: Iterable[Completion]) -> Tokens | None:
    """Return the tokens of the answers to all prompts of a request; None if there are no answers."""
    listed = list(completions)
    if not listed:
        return None
    answers = [answer for first in listed for answer in (first, *first.others)]
    return Tokens(
        sum(first.usage.prompt_tokens for first in listed),
        sum(first.usage.cached_tokens for first in listed),
        sum(answer.usage.completion_tokens for answer in answers),
    )
