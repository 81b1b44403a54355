"""One line of a batch as it was understood: a request, or why it is none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from cortexmlx.messages import TemplateVars
from cortexmlx.request import Message, SamplingParams

Identity = str | int
"""An id as a user gives it."""

Asked = str | list[int] | list[Message]
"""One prompt of a line."""


class Style(str, Enum):
    """The shape of an input line, and so of its output record."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    SIMPLE = "simple"


@dataclass(frozen=True)
class BatchRequest:
    """One request of a batch.

    `line` counts from 1; `id` is the user's, or the line. `prompts` are several only where a completions body has a
    list of them; `raw` ones skip the chat template. With `echo` an answer begins with its prompt. `body` is what a
    record repeats of the question; `template_vars` are the chat template's.
    """

    line: int
    id: Identity
    style: Style
    prompts: tuple[Asked, ...]
    params: SamplingParams
    raw: bool = False
    echo: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    template_vars: TemplateVars = field(default_factory=dict)


@dataclass(frozen=True)
class BadLine:
    """A line that is no request, and why. `id` is None where the line does not say it."""

    line: int
    id: Identity | None
    style: Style
    message: str


def key_of(identity: Identity | None, line: int) -> str:
    """What names a request and its record in all runs of a batch: its id, else its line."""
    return f"line {line}" if identity is None else json.dumps(identity)
