"""A run: rows in the order of the texts, whatever is computed first, and what an end in between leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.cli.embed import run as runs
from cortexmlx.cli.embed.files import EmbeddingRow
from cortexmlx.cli.embed.run import EmbedRun
from cortexmlx.cli.embed.texts import TextLine
from cortexmlx.errors import CortexError, EngineClosed, OutOfMemory, PromptTooLong
from cortexmlx.types.embeddings import Embeddings
from support.fakes.numbers import vector_of
from support.patience import PATIENCE


def line(number: int, text: str) -> TextLine:
    return TextLine(number, number, text or None, "" if text else "no text", "")


def computed(texts: Sequence[Any]) -> Embeddings:
    """Texts with a ! are refused, those with a ? need too much memory."""
    if any("!" in text for text in texts):
        raise PromptTooLong("too long")
    if any("?" in text for text in texts):
        raise OutOfMemory("too much")
    count = len(texts)
    return Embeddings(np.stack([vector_of(text) for text in texts]), (2,) * count, (1,) * count, (False,) * count)


@given(
    st.lists(st.sampled_from(["", "a", "b", "c", "!", "?", None]), max_size=40),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_each_line_has_its_row_in_order(sent: list[str | None], most: int, at_once: int) -> None:
    lines = [None if text is None else line(number, text) for number, text in enumerate(sent, 1)]
    rows: list[EmbeddingRow] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "MAX_CHUNK_TEXTS", most)
        patch.setattr(runs, "CHUNKS_AT_ONCE", at_once)
        run = EmbedRun(computed, rows.extend)
        run.run(lines)
    assert [row.line for row in rows] == [each for each in lines if each is not None]
    for row in rows:
        text = row.line.text
        if text in ("a", "b", "c"):
            assert row.vector is not None and (row.vector == vector_of(text)).all() and row.prompt_tokens == 2
        else:
            says = {None: "no text", "!": "too long", "?": "too much"}[text]  # type: ignore[index]
            assert row.vector is None and row.error == says
            assert row.code == ("OutOfMemory" if text == "?" else "invalid_request")
    good = sum(row.vector is not None for row in rows)
    assert (run.done, run.failed, run.tokens, run.cached) == (len(rows), len(rows) - good, 2 * good, good)


def test_an_error_does_not_call_a_text_by_its_place_in_the_last_try() -> None:
    def refused(texts: Sequence[Any]) -> Embeddings:
        raise PromptTooLong("text 0 has 9 tokens: cut off its end with `truncate`")

    rows: list[EmbeddingRow] = []
    EmbedRun(refused, rows.extend).run([line(1, "a"), line(2, "b")])
    assert [row.error for row in rows] == ["the text has 9 tokens: cut off its end with --truncate"] * 2


def test_two_chunks_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_CHUNK_TEXTS", 1)
    meeting = threading.Barrier(2)

    def met(texts: Sequence[Any]) -> Embeddings:
        meeting.wait(PATIENCE)
        return computed(texts)

    rows: list[EmbeddingRow] = []
    EmbedRun(met, rows.extend).run([line(number, "a") for number in range(1, 5)])
    assert [row.line.number for row in rows] == [1, 2, 3, 4]


def test_an_interrupt_keeps_what_has_finished_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_CHUNK_TEXTS", 1)
    rows: list[EmbeddingRow] = []
    ended = threading.Event()

    def held(texts: Sequence[Any]) -> Embeddings:
        if texts == ["b"]:
            ended.wait(PATIENCE)
        return computed(texts)

    def lines() -> Iterator[TextLine | None]:
        yield line(1, "a")
        while not rows:
            yield None
        yield line(2, "b")
        yield line(3, "c")
        yield None
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            EmbedRun(held, rows.extend).run(lines())
    finally:
        ended.set()
    assert [row.line.number for row in rows] == [1]


@pytest.mark.parametrize("error", [EngineClosed("closed"), ValueError("a bug")])
def test_the_end_of_the_engine_ends_the_run_and_nothing_after_it_is_written(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MAX_CHUNK_TEXTS", 1)
    rows: list[EmbeddingRow] = []

    def ends(texts: Sequence[Any]) -> Embeddings:
        if texts == ["b"]:
            raise error
        return computed(texts)

    with pytest.raises(type(error)):
        EmbedRun(ends, rows.extend).run([line(number, text) for number, text in enumerate("abcc", 1)])
    assert [row.line.number for row in rows] == [1]


def test_a_file_that_cannot_be_written_ends_the_run() -> None:
    def full(rows: Sequence[EmbeddingRow]) -> None:
        raise CortexError("no room")

    with pytest.raises(CortexError, match="no room"):
        EmbedRun(computed, full).run([line(1, "a")])


def test_nothing_is_written_in_the_place_of_rows_whose_writing_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_CHUNK_TEXTS", 1)
    rows: list[EmbeddingRow] = []
    futures: list[Future[Any]] = []
    submit, both = ThreadPoolExecutor.submit, threading.Event()

    def submitted(*call: Any) -> Future[Any]:
        futures.append(submit(*call))
        if len(futures) == 2:
            both.set()
        return futures[-1]

    def made(texts: Sequence[Any]) -> Embeddings:
        both.wait(PATIENCE)
        return computed(texts)

    def interrupted(some: Sequence[EmbeddingRow]) -> None:
        if some[0].line.number == 1:
            wait(futures, PATIENCE)
            raise KeyboardInterrupt
        rows.extend(some)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submitted)
    with pytest.raises(KeyboardInterrupt):
        EmbedRun(made, interrupted).run([line(1, "a"), line(2, "b")])
    assert len(futures) == 2 and rows == []
