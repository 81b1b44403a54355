"""What a request makes the engine's thread do, for which all others wait."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.serving.text.stops import StopTable
from support.core_driver import Driver
from support.tiny import tokens_of


def test_the_table_of_stop_strings_is_built_once_a_request_on_the_callers_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[int, list[str]]] = []
    build = StopTable.__init__

    def seen(self: StopTable, stops: Any = ()) -> None:
        built.append((threading.get_ident(), list(stops)))
        build(self, stops)

    monkeypatch.setattr(StopTable, "__init__", seen)
    params = SamplingParams(max_tokens=20, n=4, temperature=1.0, stop=["never said", "nor this"])
    engine.generate([1, 2, 3], params)
    me = threading.get_ident()
    assert [(thread, stops) for thread, stops in built if stops] == [(me, ["never said", "nor this"])]
    assert {thread for thread, _ in built} == {me}


def test_answers_that_are_preempted_keep_their_table(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tiny("llama"), tokens=96, max_rows=3, prefill_budget=16)
    handles = [driver.add(tokens_of(9, seed=n), 40, stop=["never said"]) for n in range(3)]
    monkeypatch.setattr(StopTable, "__init__", lambda self, stops=(): pytest.fail("a table is built again"))
    driver.finish()
    assert driver.core.stats().preemptions and all(len(driver.result(h).token_ids) == 40 for h in handles)
