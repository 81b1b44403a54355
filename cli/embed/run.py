"""Run embed: texts through the engine in chunks, rows in the order of the texts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress

from cortexmlx.cli.embed.files import EmbeddingRow
from cortexmlx.cli.embed.texts import TextLine
from cortexmlx.errors import CortexError, EngineClosed, HostLost
from cortexmlx.protocols.batch import INVALID_REQUEST
from cortexmlx.protocols.openai.embeddings import TextOrTokens
from cortexmlx.protocols.openai.errors import is_client_error
from cortexmlx.system.waits import LONGEST_SECONDS
from cortexmlx.types.embeddings import Embeddings

MAX_CHUNK_TEXTS = 128
"""Texts of a chunk."""

MAX_CHUNK_CHARACTERS = 1 << 18
"""Characters of a chunk, roughly. Its rows are on disk when all of it is computed."""

CHUNKS_AT_ONCE = 2
"""Chunks that are computed at once: while the last texts of one are computed, the next ones fill the steps."""

Embed = Callable[[Sequence[TextOrTokens]], Embeddings]
Append = Callable[[Sequence[EmbeddingRow]], None]


class EmbedRun:
    """One embed run: computes the embeddings of lines with `embed`, and gives their rows to `append` in order.

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
        """Embed all lines. An interrupt keeps finished rows. Raises EngineClosed, HostLost and what `append` raises."""
        pending: deque[Future[list[EmbeddingRow]]] = deque()
        pool = ThreadPoolExecutor(CHUNKS_AT_ONCE, "cortexmlx-embed")
        try:
            for chunk in _split_chunks(lines):
                if chunk:
                    pending.append(pool.submit(self._rows_of_chunk, chunk))
                while len(pending) > CHUNKS_AT_ONCE or (pending and pending[0].done()):
                    self._append_oldest(pending)
            while pending:
                self._append_oldest(pending)
        except BaseException:
            while pending and pending[0].done():
                with suppress(CortexError):
                    self._append_oldest(pending)
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # the engine's end ends what is computed

    def _append_oldest(self, pending: deque[Future[list[EmbeddingRow]]]) -> None:
        """Wait for the oldest chunk, and append its rows."""
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

    def _rows_of_chunk(self, chunk: Sequence[TextLine]) -> list[EmbeddingRow]:
        """Return the rows of a chunk, including those of unreadable lines."""
        texts = [(line, line.text) for line in chunk if line.text is not None]
        rows_by_line = {row.line.number: row for row in self._compute_rows(texts)}
        return [rows_by_line.get(line.number) or EmbeddingRow(line, None, error=line.error) for line in chunk]

    def _compute_rows(self, texts: Sequence[tuple[TextLine, TextOrTokens]]) -> list[EmbeddingRow]:
        """Compute the rows of texts. If the engine refuses one of them, the others are computed without it."""
        if not texts:
            return []
        try:
            embeddings = self._embed([text for _, text in texts])
        except (EngineClosed, HostLost):
            raise
        except CortexError as error:
            if len(texts) == 1:
                code = INVALID_REQUEST if is_client_error(error) else type(error).__name__
                message = str(error).replace("text 0 ", "the text ", 1).replace("`truncate`", "--truncate")
                return [EmbeddingRow(texts[0][0], None, error=message, code=code)]
            middle = len(texts) // 2
            return self._compute_rows(texts[:middle]) + self._compute_rows(texts[middle:])
        counts = zip(embeddings.prompt_tokens, embeddings.cached_tokens, embeddings.truncated, strict=True)
        return [
            EmbeddingRow(line, vector, *count)
            for (line, _), vector, count in zip(texts, embeddings.vectors, counts, strict=True)
        ]


def _split_chunks(lines: Iterable[TextLine | None]) -> Iterator[list[TextLine]]:
    """Yield the lines in chunks. While no line arrives, yield the lines so far, which may be none."""
    chunk: list[TextLine] = []
    size = 0
    for line in lines:
        if line is not None:
            chunk.append(line)
            size += len(line.text or "")
        if line is None or len(chunk) >= MAX_CHUNK_TEXTS or size >= MAX_CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    yield chunk
