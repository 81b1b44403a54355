"""The status line of an answer while it is written: prompt progress, speed, use of context and arena; optionally a
picture of the arena.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cortexmlx.cli.terminal.progress import STOPPING, prefill_text
from cortexmlx.errors import CortexError
from cortexmlx.stats import BlockMap, BlockState
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import TokenEvent

if TYPE_CHECKING:
    from rich.text import Text

    from cortexmlx.sessions.reply import Reply

WATCH_SECONDS = 0.25
"""Time between two pictures of the arena."""

MAX_HEIGHT_SHARE = 3
"""The picture of the arena takes one of this many lines of the window."""


class ArenaView:
    """The newest picture of the KV arena, and whether it is shown below the answer."""

    def __init__(self, ask: Callable[[], BlockMap]) -> None:
        self.is_shown = False
        self.newest_map: BlockMap | None = None
        self._ask = ask
        self._draw_key: tuple[BlockMap, int, int, bool] | None = None
        self._drawn_rows: list[Text] = []

    def toggle(self) -> None:
        """Show or hide the picture."""
        self.is_shown = not self.is_shown

    def watch(self, stop_event: threading.Event) -> None:
        """Take pictures until `stop_event` or the engine's end, each after a wait for a step: run it on a thread."""
        while not stop_event.is_set():
            try:
                self.newest_map = self._ask()
            except CortexError:
                return
            stop_event.wait(WATCH_SECONDS)

    def rows(self, width: int, height: int, *, plain: bool = False) -> list[Text]:
        """Return the picture in rows for a window of this size, in cells; nothing if it is hidden or not taken yet."""
        from cortexmlx.cli.terminal.blockmap import draw_blocks

        if not self.is_shown or self.newest_map is None:
            return []
        draw_key = (self.newest_map, width, height, plain)
        if draw_key != self._draw_key:  # an answer is drawn more often than a picture is taken
            self._draw_key, self._drawn_rows = (
                draw_key,
                draw_blocks(self.newest_map, width, max(height // MAX_HEIGHT_SHARE, 1), ascii_only=plain),
            )
        return self._drawn_rows


class AnswerStatus:
    """The status line of one answer, in a context of `context` tokens. In a `with`, a thread takes arena pictures."""

    def __init__(self, answer: Reply, context: int, arena: ArenaView | None = None) -> None:
        self.arena = arena
        self._answer = answer
        self._context = context
        self._tokens = 0
        self._dropped_tokens = 0
        self._reread_progress: Progress | None = None
        self._started = time.monotonic()
        self._first_token_time = 0.0
        self._stop_event = threading.Event()

    def __enter__(self) -> AnswerStatus:
        if self.arena is not None:
            threading.Thread(
                target=self.arena.watch, args=(self._stop_event,), name="cortexmlx-arena", daemon=True
            ).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop_event.set()

    def update(self, event: TokenEvent) -> None:
        """Update the status with an event of the answer."""
        self._dropped_tokens += event.dropped
        self._reread_progress = event.progress
        if event.token_id is not None:
            self._tokens += 1
            self._first_token_time = self._first_token_time or time.monotonic()

    def line(self) -> str:
        """Return the status as one line."""
        now, prompt, progress = time.monotonic(), len(self._answer.prompt), self._answer.progress
        if self._answer.cancelling:
            return "stopping" if self._first_token_time else STOPPING
        if not self._first_token_time:
            return f"{_prompt_progress(progress, prompt)} · {now - self._started:.0f} s"
        if (reread := self._reread_progress) is not None:
            return f"{self._tokens:,} tokens · {_prompt_progress(reread, reread.total)} again"
        parts = [f"{self._tokens:,} token{'s' * (self._tokens != 1)}"]
        if (seconds := now - self._first_token_time) > 0.5:
            parts.append(f"{(self._tokens - 1) / seconds:.0f} tok/s")
        parts.append(f"TTFT {self._first_token_time - self._started:.1f} s")
        used_fraction = (prompt + self._tokens - self._dropped_tokens) / self._context
        parts.append(f"context {used_fraction:.0%}")
        if self.arena is not None and (picture := self.arena.newest_map) is not None:
            held_blocks = picture.count(BlockState.PRIVATE) + picture.count(BlockState.SHARED)
            parts.append(f"KV {held_blocks:,} block{'s' * (held_blocks != 1)}")
        if progress is not None and progress.cached:
            parts.append(f"{progress.cached:,} cached")
        if self._dropped_tokens:
            parts.append(f"{self._dropped_tokens:,} dropped")
        return " · ".join(parts)


def _prompt_progress(progress: Progress | None, prompt: int) -> str:
    """Return how much of the prompt is computed, as text."""
    if progress is None or progress.done == progress.cached == 0:
        return f"reading {prompt:,} tokens"
    return prefill_text(progress)
