"""How far a long prompt is: a bar on stderr, where a person looks, that goes before the answer begins."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from cortexmlx.cli.terminal import console
from cortexmlx.request import TokenEvent

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Reading:
    """Told of every event of an answer. Nothing is shown of a prompt that takes one step."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID
        self._wanted = console.is_terminal(sys.stderr)

    def __enter__(self) -> Reading:
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
        said = f"reading {news.done:,} of {news.total:,} tokens"
        said += f" ({news.cached:,} cached)" if news.cached else ""
        self._bar.update(self._task, description=said, total=news.total, completed=news.done)

    def stopping(self) -> None:
        """Say that the stop was heard: it ends with the piece that is under way."""
        if self._bar is not None:
            self._bar.update(self._task, description="stopping with the piece of the prompt that is under way")
            self._bar.refresh()

    def _opened(self) -> Progress:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TaskProgressColumn(), TimeElapsedColumn())
        bar = Progress(*columns, console=console.stderr(), transient=True)
        bar.start()
        return bar

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
