"""A batch through the engine: how much is held, and what an interrupt keeps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from cortexmlx.cli.batch.input import BadLine, BatchRequest, Style
from cortexmlx.cli.batch.run import HELD_PER_ROW, BatchRun
from cortexmlx.messages import ChatPrompt
from cortexmlx.request import SamplingParams
from cortexmlx.serving.config import EngineConfig
from support.cli_fakes import FakeEngine


def test_in_order_no_more_is_held_than_the_window_bad_lines_included() -> None:
    written: list[Any] = []

    def items() -> Iterator[BatchRequest | BadLine]:
        yield BatchRequest(1, 1, Style.SIMPLE, "!slow", SamplingParams(max_tokens=4))
        for line in range(2, 400):
            assert (written == []) == (line <= 2 * HELD_PER_ROW)
            yield BadLine(line, line, Style.SIMPLE, "no request")

    engine: Any = FakeEngine(EngineConfig("fake", max_rows=2))
    BatchRun(engine, items(), written.append, lambda text: text, rows=2, ordered=True).run()
    assert [record["id"] for record in written] == list(range(1, 400))


def test_an_interrupt_while_writing_keeps_every_answer_that_is_there() -> None:
    written: list[Any] = []

    def write(record: Any) -> None:
        if not written:
            deadline = time.monotonic() + 10
            while engine.in_flight > 1 and time.monotonic() < deadline:
                time.sleep(0.005)
        written.append(record)
        if len(written) == 1:
            raise KeyboardInterrupt

    prompts = ["quick", "!slow and more", *(f"question {i}" for i in range(5))]
    items = [BatchRequest(i, i, Style.SIMPLE, prompt, SamplingParams()) for i, prompt in enumerate(prompts, 1)]
    engine: Any = FakeEngine(EngineConfig("fake", max_rows=4))
    run = BatchRun(engine, items, write, lambda text: text, rows=4, ordered=False)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert {record["id"] for record in written} == {1, 3, 4, 5, 6, 7}


def test_each_requests_variables_reach_its_template_and_one_that_it_does_not_read_is_its_own_error() -> None:
    written: list[Any] = []
    kinds: list[tuple[Any, dict[str, object]]] = [
        ("text", {"enable_thinking": False}),
        ([{"role": "user", "content": "list"}], {"reasoning_effort": "low"}),
        ("plain", {}),
        ("wrong", {"colour": "red"}),
    ]
    items = [
        BatchRequest(i, i, Style.SIMPLE, prompt, SamplingParams(), template_vars=variables)
        for i, (prompt, variables) in enumerate(kinds, 1)
    ]
    engine: Any = FakeEngine(EngineConfig("fake", max_rows=4))
    BatchRun(engine, items, written.append, lambda text: text, rows=4, ordered=True).run()
    seen = [prompt for prompt, _ in engine.seen]
    assert ChatPrompt([{"role": "user", "content": "text"}], {"enable_thinking": False}) in seen
    assert ChatPrompt([{"role": "user", "content": "list"}], {"reasoning_effort": "low"}) in seen
    assert "plain" in seen and len(seen) == 3
    assert "does not read colour" in written[3]["error"]["message"]
