"""Progress bars on stderr: of downloading and loading a model, of compiling its kernels, and of a long prompt."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import delay_interrupts
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.cli.terminal.text import format_duration, shorten_start
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.types.progress import OnProgress, Progress
from cortexmlx.types.request import TokenEvent

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

LINE_SECONDS = 10.0
"""How often a download prints a line if there is no bar."""

_BAR = 12
_WIDE = 64
"""Columns from which on there is room for figures."""


@contextmanager
def loading_progress(model: str) -> Iterator[OnProgress]:
    """Show the progress of loading a model: yield a function for an engine's `on_progress`. The bar disappears when
    the model is loaded.

    A pipe gets only the lines of a download, since the rest takes seconds. An interrupted download says what is kept.
    """
    model = to_single_line(model)
    last: list[Progress] = []
    try:
        with _loading_bar(model) if console.is_terminal(sys.stderr) else _loading_lines(model) as show:

            def on_progress(progress: Progress) -> None:
                last[:] = [progress]
                show(progress)

            yield on_progress
    except KeyboardInterrupt:
        if last and last[0].what == "downloading" and last[0].done:
            console.print_note(f"stopped; {_amount_text(last[0])} are kept: run the same command to continue")
        raise


@contextmanager
def _loading_bar(model: str) -> Iterator[OnProgress]:
    from rich import progress as rich

    figures = rich.TextColumn("{task.fields[figures]}", markup=False)
    stderr_console = console.stderr()
    columns = (rich.TextColumn("{task.description}", markup=False), rich.BarColumn(bar_width=_BAR), figures)
    bar = rich.Progress(*columns, console=stderr_console, transient=True)
    try:
        with delay_interrupts():  # an interrupted start leaves a bar that cannot be ended
            bar.start()
            task = bar.add_task(f"loading {model}", total=None, figures="")

        def show(progress: Progress) -> None:
            figures_text = progress_numbers(progress) if stderr_console.width >= _WIDE else f"{progress.fraction:.0%}"
            name = shorten_start(model, stderr_console.width - len(progress.what) - _BAR - len(figures_text) - 4)
            bar.update(
                task,
                description=f"{progress.what} {name}",
                total=progress.total or None,
                completed=progress.done,
                figures=figures_text,
            )

        yield show
    finally:
        with delay_interrupts(), console.PRINTING:
            bar.stop()


@contextmanager
def _loading_lines(model: str) -> Iterator[OnProgress]:
    """Yield a function that prints a line on the download now and then, for a log."""
    next_line_time = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal next_line_time
        if progress.what == "downloading" and progress.total and time.monotonic() >= next_line_time:
            next_line_time = time.monotonic() + LINE_SECONDS
            console.print_note(f"downloading {model}: {progress_numbers(progress)}")

    yield show


def _amount_text(progress: Progress) -> str:
    """Return how much is done as text, such as `1.2 of 4.5 GiB`, or `300 MiB of 4.5 GiB`."""
    (done, unit), total = format_bytes(progress.done).split(), format_bytes(progress.total)
    return f"{done} of {total}" if total.endswith(f" {unit}") else f"{done} {unit} of {total}"


def progress_numbers(progress: Progress) -> str:
    """Return progress as text: `1.2 of 4.5 GiB · 35 MiB/s · 42 s left`, `1 of 3 kernels`, or `67%`."""
    if progress.what == "compiling":
        return f"{progress.done} of {progress.total} kernels"
    if progress.what != "downloading":
        return f"{progress.fraction:.0%}"
    if not progress.total:
        return "asking the hub"
    parts = [_amount_text(progress)]
    if progress.rate:
        parts.append(f"{format_bytes(progress.rate)}/s")
    if (seconds_left := progress.seconds_left) is not None:
        parts.append(f"{format_duration(seconds_left)} left")
    return " · ".join(parts)


STOPPING = "stopping with the piece of the prompt that is under way"


def prefill_text(progress: Progress) -> str:
    """Return the progress of a prompt as text: `reading 1,024 of 4,096 tokens, 512 cached`."""
    cached = f", {progress.cached:,} cached" if progress.cached else ""
    return f"reading {progress.done:,} of {progress.total:,} tokens{cached}"


class PrefillProgress:
    """The progress bar of a long prompt. A prompt that takes only one step has none."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._task: TaskID
        self._is_terminal = console.is_terminal(sys.stderr)

    def __enter__(self) -> PrefillProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close_bar()

    def update(self, event: TokenEvent) -> None:
        """Update the bar with an event of the answer, or remove it when the prompt is computed."""
        progress = event.progress
        if progress is None:
            return self._close_bar()
        if not self._is_terminal:
            return
        if self._bar is None:
            self._bar = self._open_bar()
            self._task = self._bar.add_task("")
        self._bar.update(self._task, description=prefill_text(progress), total=progress.total, completed=progress.done)

    def show_stopping(self) -> None:
        """Show that Ctrl-C was noticed. The piece of the prompt that is being computed is still finished."""
        if self._bar is not None:
            self._bar.update(self._task, description=STOPPING)
            self._bar.refresh()

    def _open_bar(self) -> Bar:
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

    def _close_bar(self) -> None:
        if self._bar is not None:
            with console.PRINTING:
                self._bar.stop()
            self._bar = None
