"""The status of an answer that nobody writes."""

from __future__ import annotations

from dataclasses import dataclass

from cortexmlx.cli.chat.status import AnswerStatus, ArenaView
from cortexmlx.errors import EngineClosed
from cortexmlx.stats import BlockMap
from cortexmlx.types.progress import Progress


@dataclass
class Written:
    """What a status reads of a reply."""

    prompt: range
    progress: Progress | None = None
    cancelling: bool = False


def closed() -> BlockMap:
    """The picture that an engine takes that has gone."""
    raise EngineClosed("the engine is closed")


def status_of(prompt: int, context: int) -> AnswerStatus:
    """Of an answer to so many tokens of prompt."""
    return AnswerStatus(Written(range(prompt)), context, ArenaView(closed))
