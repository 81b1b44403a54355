"""The Python side of the recipe for Swift, at the other ends of its pipes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.examples import example
from support.patience import PATIENCE


class Host:
    """What the Swift side is: lines in, lines out."""

    def __init__(self, model: str) -> None:
        reads, self._asks = os.pipe()
        hears, writes = os.pipe()
        self._heard = os.fdopen(hears, encoding="utf-8")
        self.thread = threading.Thread(
            target=example("swift_host/host.py").run, args=(model, reads, writes), daemon=True
        )
        self.thread.start()

    def ask(self, line: Any) -> None:
        os.write(self._asks, (line if isinstance(line, str) else json.dumps(line)).encode() + b"\n")

    def hear(self) -> Any:
        return json.loads(self._heard.readline() or "null")

    def close(self) -> None:
        os.close(self._asks)
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        self._heard.close()


@pytest.fixture
def host(tiny: Any) -> Iterator[Host]:
    host = Host(str(tiny("llama")))
    assert host.hear() == {"ready": str(tiny("llama"))}
    yield host
    host.close()


def asked(number: int, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"number {number}?"}]
    return {"id": number, "messages": messages, "max_tokens": tokens, "temperature": 0}


def test_answers_come_in_pieces_each_under_its_number(host: Host) -> None:
    for number in (1, 2):
        host.ask(asked(number, 8))
    texts, ends = {1: "", 2: ""}, {}
    while len(ends) < 2:
        line = host.hear()
        texts[line["id"]] += line.get("text", "")
        if "end" in line:
            ends[line["id"]] = line["end"]
    assert all(texts.values()) and set(ends.values()) <= {"length", "stop"}


def test_one_that_is_cancelled_ends(host: Host) -> None:
    host.ask(asked(1, 400))
    assert "text" in host.hear()
    host.ask({"cancel": 1})
    host.ask({"cancel": 77})
    while "end" not in (line := host.hear()):
        assert line["id"] == 1
    assert line == {"id": 1, "end": "cancelled"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no json", "Expecting value"),
        ("5", "no attribute"),
        ({"id": 1}, "the prompt is empty"),
        ({"id": "1", "messages": []}, "id is '1'"),
        ({"id": 3, "messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_a_bad_line_is_an_error_and_not_the_end(host: Host, line: Any, said: str) -> None:
    host.ask(line)
    assert said in host.hear()["error"]
    host.ask(asked(9, 1))
    while "end" not in (line := host.hear()):
        assert line["id"] == 9


def test_closing_while_it_answers_ends_it(tiny: Any) -> None:
    host = Host(str(tiny("llama")))
    host.hear()
    host.ask(asked(1, 400))
    assert "text" in host.hear()
    host.close()


def test_a_model_that_is_not_there_is_said() -> None:
    host = Host("no such model")
    assert "no model 'no such model'" in host.hear()["error"]
    assert host.hear() is None
    host.close()
