"""Run embed: texts through the engine in chunks, rows in the order of the texts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress

from cortexmlx.cli.embed.rows import Row
from cortexmlx.cli.embed.texts import TextLine
from cortexmlx.errors import CortexError, EngineClosed, HostLost
from cortexmlx.protocols.batch import INVALID
from cortexmlx.protocols.openai.embeddings import Text
from cortexmlx.protocols.openai.errors import is_refusal
from cortexmlx.system.waits import LONGEST_SECONDS
from cortexmlx.types.embeddings import Embeddings

MOST_TEXTS = 128
"""Texts of a chunk."""

MOST_CHARACTERS = 1 << 18
"""Characters of a chunk, roughly. Its rows are on disk when all of it is computed."""

AT_ONCE = 2
"""Chunks that are computed at once: while the last texts of one are computed, the next ones fill the steps."""

Embed = Callable[[Sequence[Text]], Embeddings]
Append = Callable[[Sequence[Row]], None]


class EmbedRun:
    """A run that has `embed` compute the embeddings of lines, and hands their rows to `append` in order.

    - `done`, `failed`: rows that were handed over, and those of them without a vector.
    - `tokens`, `cached`: tokens of their texts, and those of them from the cache.
    """

    def __init__(self, embed: Embed, append: Append) -> None:
        self.done = 0
        self.failed = 0
        self.tokens = 0
        self.cached = 0
        self._embed = embed
        self._append = append
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the run was made."""
        return time.monotonic() - self._started

    def run(self, lines: Iterable[TextLine | None]) -> None:
        """Run to the end. An interrupt keeps what has finished. Raises EngineClosed and HostLost, and what `append`
        raises.
        """
        pending: deque[Future[list[Row]]] = deque()
        pool = ThreadPoolExecutor(AT_ONCE, "cortexmlx-embed")
        try:
            for chunk in _chunks(lines):
                if chunk:
                    pending.append(pool.submit(self._rows, chunk))
                while len(pending) > AT_ONCE or (pending and pending[0].done()):
                    self._take(pending)
            while pending:
                self._take(pending)
        except BaseException:
            while pending and pending[0].done():
                with suppress(CortexError):
                    self._take(pending)
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # the engine's end ends what is computed

    def _take(self, pending: deque[Future[list[Row]]]) -> None:
        """Wait for the oldest chunk, and hand its rows over."""
        while not pending[0].done():
            wait(pending, LONGEST_SECONDS, FIRST_COMPLETED)  # a signal ends it soon, whenever it comes
        try:
            rows = pending.popleft().result()
            self._append(rows)
        except BaseException:  # what comes after it has no place, also after Ctrl-C
            pending.clear()
            raise
        self.done += len(rows)
        self.failed += sum(row.vector is None for row in rows)
        self.tokens += sum(row.prompt_tokens for row in rows)
        self.cached += sum(row.cached_tokens for row in rows)

    def _rows(self, chunk: Sequence[TextLine]) -> list[Row]:
        texts = [(line, line.text) for line in chunk if line.text is not None]
        computed = {row.line.number: row for row in self._computed(texts)}
        return [computed.get(line.number) or Row(line, None, error=line.refused) for line in chunk]

    def _computed(self, texts: Sequence[tuple[TextLine, Text]]) -> list[Row]:
        """Return the rows of texts. If the engine refuses one of them, the others are computed without it."""
        if not texts:
            return []
        try:
            made = self._embed([text for _, text in texts])
        except (EngineClosed, HostLost):
            raise
        except CortexError as error:
            if len(texts) == 1:
                code = INVALID if is_refusal(error) else type(error).__name__
                said = str(error).replace("text 0 ", "the text ", 1).replace("`truncate`", "--truncate")
                return [Row(texts[0][0], None, error=said, code=code)]
            middle = len(texts) // 2
            return self._computed(texts[:middle]) + self._computed(texts[middle:])
        counts = zip(made.prompt_tokens, made.cached_tokens, made.truncated, strict=True)
        return [Row(line, vector, *count) for (line, _), vector, count in zip(texts, made.vectors, counts, strict=True)]


def _chunks(lines: Iterable[TextLine | None]) -> Iterator[list[TextLine]]:
    """Yield the lines in chunks. While no line arrives, yield what there is, which may be nothing."""
    chunk: list[TextLine] = []
    size = 0
    for line in lines:
        if line is not None:
            chunk.append(line)
            size += len(line.text or "")
        if line is None or len(chunk) >= MOST_TEXTS or size >= MOST_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    yield chunk
