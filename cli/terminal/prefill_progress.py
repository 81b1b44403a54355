"""Progress of a long prompt: in words, and as a bar that goes before the answer begins."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from cortexmlx.cli.terminal import console
from cortexmlx.progress import Progress
from cortexmlx.request import TokenEvent

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

STOPPING = "stopping with the piece of the prompt that is under way"


def how_far(news: Progress) -> str:
    """Such as `reading 1,024 of 4,096 tokens, 512 cached`."""
    cached = f", {news.cached:,} cached" if news.cached else ""
    return f"reading {news.done:,} of {news.total:,} tokens{cached}"


class PrefillProgress:
    """Told of every event of an answer. Nothing is shown of a prompt that takes one step."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._task: TaskID
        self._wanted = console.is_terminal(sys.stderr)

    def __enter__(self) -> PrefillProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def note(self, event: TokenEvent) -> None:
        """Show how far the prompt is, or if it is done, nothing any more."""
        news = event.progress
        if news is None:
            return self._close()
        if not self._wanted:
            return
        if self._bar is None:
            self._bar = self._opened()
            self._task = self._bar.add_task("")
        self._bar.update(self._task, description=how_far(news), total=news.total, completed=news.done)

    def stopping(self) -> None:
        """Say that the stop was heard: it ends with the piece that is under way."""
        if self._bar is not None:
            self._bar.update(self._task, description=STOPPING)
            self._bar.refresh()

    def _opened(self) -> Bar:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        bar = Bar(*columns, console=console.stderr(), transient=True)
        bar.start()
        return bar

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
