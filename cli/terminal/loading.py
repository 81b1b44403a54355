"""Progress of downloading and loading: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import uninterrupted
from cortexmlx.cli.terminal.harmless.characters import in_a_line
from cortexmlx.cli.terminal.text import duration, fitted
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.progress import OnProgress, Progress

LINE_SECONDS = 10.0
"""How often a download says a line where there is no bar."""

_BAR = 12
_WIDE = 64
"""Columns from which on there is room for figures."""


@contextmanager
def loading(model: str) -> Iterator[OnProgress]:
    """What is to be told of a model's progress, as `on_progress` of an engine. The bar goes away when the model is
    there. A pipe gets lines of a download alone: the rest takes seconds. An interrupted download says what is kept.
    """
    model = in_a_line(model)
    last: list[Progress] = []
    try:
        with _bar(model) if console.is_terminal(sys.stderr) else _lines(model) as show:

            def told(news: Progress) -> None:
                last[:] = [news]
                show(news)

            yield told
    except KeyboardInterrupt:
        if last and last[0].what == "downloading" and last[0].done:
            console.note(f"stopped; {_of(last[0])} are kept, and the same command goes on there")
        raise


@contextmanager
def _bar(model: str) -> Iterator[OnProgress]:
    from rich import progress as rich

    figures = rich.TextColumn("{task.fields[figures]}", markup=False)
    screen = console.stderr()
    columns = (rich.TextColumn("{task.description}", markup=False), rich.BarColumn(bar_width=_BAR), figures)
    bar = rich.Progress(*columns, console=screen, transient=True)
    try:
        with uninterrupted():  # a bar that has half begun cannot be ended: it would be drawn for ever
            bar.start()
            task = bar.add_task(f"loading {model}", total=None, figures="")

        def show(news: Progress) -> None:
            says = numbers(news) if screen.width >= _WIDE else f"{news.fraction:.0%}"
            name = fitted(model, screen.width - len(news.what) - _BAR - len(says) - 4)
            bar.update(
                task, description=f"{news.what} {name}", total=news.total or None, completed=news.done, figures=says
            )

        yield show
    finally:
        with uninterrupted():
            bar.stop()


@contextmanager
def _lines(model: str) -> Iterator[OnProgress]:
    due = time.monotonic()

    def show(news: Progress) -> None:
        nonlocal due
        if news.what == "downloading" and news.total and time.monotonic() >= due:
            due = time.monotonic() + LINE_SECONDS
            console.note(f"downloading {model}: {numbers(news)}")

    yield show


def _of(news: Progress) -> str:
    """Such as `1.2 of 4.5 GiB`, or `300 MiB of 4.5 GiB`."""
    (done, unit), total = format_bytes(news.done).split(), format_bytes(news.total)
    return f"{done} of {total}" if total.endswith(f" {unit}") else f"{done} {unit} of {total}"


def numbers(news: Progress) -> str:
    """Such as `1.2 of 4.5 GiB · 35 MiB/s · 42 s left`, or `67%`."""
    if news.what != "downloading":
        return f"{news.fraction:.0%}"
    if not news.total:
        return "asking the hub"
    parts = [_of(news)]
    if news.rate:
        parts.append(f"{format_bytes(news.rate)}/s")
    if (left := news.seconds_left) is not None:
        parts.append(f"{duration(left)} left")
    return " · ".join(parts)
