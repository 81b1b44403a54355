"""A batch through the engine: how much is held, and what an interrupt keeps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cortexmlx.cli.batch.run import MAX_HELD_PER_ROW, BatchRun
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import CortexError, EngineClosed, InvalidRequest
from cortexmlx.protocols.batch import BatchRequest, InvalidLine, LineStyle, RecordBuilder
from cortexmlx.protocols.request import Request
from cortexmlx.types.messages import ChatPrompt
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.cli_fakes import FakeEngine
from support.patience import PATIENCE, soon


class Written:
    """A writer that calls `take` with each record, and counts how often it is to sync."""

    def __init__(self, take: Any) -> None:
        self.write = take
        self.synced = 0

    def sync(self) -> None:
        self.synced += 1


def batch_run(
    engine: Any, items: Any, write: Any, *, rows: int = 2, in_order: bool = True, prepare: Any = None
) -> BatchRun:
    recorder = RecordBuilder("fake", 0, engine.token_bytes)
    prepare = prepare or (lambda request, asked: asked)
    return BatchRun(engine, items, Written(write), prepare, recorder, rows=rows, in_order=in_order)


def simple(line: int, *prompts: str, **params: Any) -> BatchRequest:
    style = LineStyle.COMPLETIONS if len(prompts) > 1 else LineStyle.SIMPLE
    return BatchRequest(line, line, style, Request(prompts, SamplingParams(**params)))


def test_in_order_no_more_is_held_than_the_window_bad_lines_included() -> None:
    written: list[Any] = []
    may_end = threading.Event()

    class Waiting(FakeEngine):
        def _answer(self, *asked: Any) -> None:
            assert may_end.wait(PATIENCE)
            super()._answer(*asked)

    def items() -> Iterator[BatchRequest | InvalidLine]:
        yield simple(1, "a")
        for line in range(2, 400):
            assert (written == []) == (line <= 2 * MAX_HELD_PER_ROW)
            if line == 2 * MAX_HELD_PER_ROW:
                may_end.set()
            yield InvalidLine(line, line, LineStyle.SIMPLE, "no request")

    engine: Any = Waiting(EngineConfig("fake", max_rows=2))
    batch_run(engine, items(), written.append).run()
    assert [record["id"] for record in written] == list(range(1, 400))


def test_an_interrupt_while_writing_keeps_every_answer_that_is_there() -> None:
    written: list[Any] = []

    def write(record: Any) -> None:
        if not written:
            assert soon(lambda: engine.ended == 6)
        written.append(record)
        if len(written) == 1:
            raise KeyboardInterrupt

    prompts = ["quick", "!slow and more", *(f"question {i}" for i in range(5))]
    items = [simple(i, prompt) for i, prompt in enumerate(prompts, 1)]
    engine: Any = FakeEngine(EngineConfig("fake", max_rows=4))
    run = batch_run(engine, items, write, rows=4, in_order=False)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert {record["id"] for record in written} == {1, 3, 4, 5, 6, 7}


def test_what_has_finished_is_counted_whether_it_may_be_written_or_not() -> None:
    class Last(FakeEngine):
        def _answer(self, handle: Any, prompt: Any, text: str, params: SamplingParams) -> None:
            assert text != "last" or soon(lambda: self.ended == 2)
            super()._answer(handle, prompt, text, params)

    engine: Any = Last(EngineConfig("fake", max_rows=4))
    counted: list[tuple[int, int]] = []
    run = batch_run(
        engine,
        [simple(1, "last"), simple(2, "b"), simple(3, "!fail")],
        lambda record: counted.append((run.done_count, run.failed_count)),
    )
    run.run()
    assert counted[0] == (3, 1) and len(counted) == 3


def test_a_request_of_several_prompts_has_one_record_when_the_last_has_finished() -> None:
    engine: Any = FakeEngine(EngineConfig("fake", max_rows=4))
    written: list[Any] = []
    items = [simple(1, "!long", "b", max_tokens=9), simple(2, "c", "!full"), simple(3, "d")]
    run = batch_run(engine, items, written.append, rows=4, in_order=False)
    run.run()
    records = {record.get("custom_id", record.get("id")): record for record in written}
    assert len(written) == 3 and (run.done_count, run.failed_count) == (3, 1)
    texts = [choice["text"] for choice in records[1]["response"]["body"]["choices"]]
    assert texts == [" ".join(f"word{i}" for i in range(9)), "You said: b"]
    assert records[2]["error"]["code"] == "KVCacheFull" and records[3]["text"] == "You said: d"


def test_what_cannot_be_prepared_is_a_record_and_not_the_end() -> None:
    def prepare(request: Request, asked: Any) -> Any:
        if asked == "bad":
            raise InvalidRequest("the template leaves that out")
        return asked

    engine: Any = FakeEngine(EngineConfig("fake"))
    written: list[Any] = []
    batch_run(engine, [simple(1, "bad"), simple(2, "good")], written.append, prepare=prepare).run()
    assert [record.get("text") for record in written] == [None, "You said: good"]
    assert written[0]["error"] == {"code": "invalid_request", "message": "the template leaves that out", "line": 1}


def test_an_input_that_breaks_off_keeps_what_has_finished_and_a_full_disk_is_said_once() -> None:
    def broken() -> Iterator[BatchRequest]:
        yield simple(1, "a")
        yield simple(2, "!slow")
        assert soon(lambda: engine.ended == 1)
        raise InvalidRequest("lines 1 and 3 have one id")

    engine: Any = FakeEngine(EngineConfig("fake"))
    written: list[Any] = []
    with pytest.raises(InvalidRequest, match="lines 1 and 3"):
        batch_run(engine, broken(), written.append).run()
    assert [record["id"] for record in written] == [1]

    def full(record: Any) -> None:
        tried.append(record)
        raise CortexError("no space left")

    tried: list[Any] = []
    with pytest.raises(CortexError, match="no space left"):
        batch_run(FakeEngine(EngineConfig("fake")), [simple(i, "a") for i in range(1, 9)], full, in_order=False).run()
    assert len(tried) == 1


def test_a_variable_that_the_template_does_not_read_is_an_error_of_its_request() -> None:
    written: list[Any] = []
    hi = [{"role": "user", "content": "hi"}]
    prompts = [ChatPrompt(hi, {"enable_thinking": False}), ChatPrompt(hi, {"colour": "red"})]
    engine: Any = FakeEngine(EngineConfig("fake", max_rows=4))
    batch_run(
        engine, [simple(1, "0"), simple(2, "1")], written.append, prepare=lambda _, asked: prompts[int(asked)]
    ).run()
    assert [prompt for prompt, _ in engine.seen] == prompts[:1] and "text" in written[0]
    assert "does not read colour" in written[1]["error"]["message"]


def test_what_has_finished_together_is_synced_together() -> None:
    """The first record is written while all others finish; the disk is asked for them once, or a few times."""

    def slow(record: Any) -> None:
        assert soon(lambda: engine.ended == 32)
        written.append(record)

    written: list[Any] = []
    engine: Any = FakeEngine(EngineConfig("fake", max_rows=8))
    run = batch_run(engine, [simple(i, "quick") for i in range(1, 33)], slow, rows=8, in_order=False)
    run.run()
    assert len(written) == 32 and 1 <= run._writer.synced <= 8  # type: ignore[attr-defined]


def test_an_engine_that_ended_is_not_taken_for_the_end_of_the_batch() -> None:
    class Failing(FakeEngine):
        def _answer(self, handle: Any, prompt: Any, text: str, params: SamplingParams) -> None:
            if text == "closed":
                assert soon(lambda: self.ended == 1)
                handle.fail(EngineClosed("the engine's thread failed"))
            else:
                super()._answer(handle, prompt, text, params)

    def items() -> Iterator[BatchRequest]:
        yield simple(1, "a")
        yield simple(2, "closed")
        assert soon(lambda: engine.ended == 2), "both have ended when the first of them is handed out"

    written: list[Any] = []
    engine: Any = Failing(EngineConfig("fake"))
    with pytest.raises(EngineClosed, match="the engine ended before 1 requests did: --resume asks them again"):
        batch_run(engine, items(), written.append, in_order=False).run()
    assert [record["id"] for record in written] == [1]
