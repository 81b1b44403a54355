"""What a request makes the engine's thread do, for which all others wait."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.core.answers import request_for_answer
from cortexmlx.core.text import StopStringTable
from cortexmlx.execution.sampling import BatchSampler
from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.types.request import QueuedRequest
from cortexmlx.types.sampling_params import TokenBiases
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of


def test_the_table_of_stop_strings_is_built_once_a_request_on_the_callers_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[int, list[str]]] = []
    build = StopStringTable.__init__

    def seen(self: StopStringTable, stops: Any = ()) -> None:
        built.append((threading.get_ident(), list(stops)))
        build(self, stops)

    monkeypatch.setattr(StopStringTable, "__init__", seen)
    params = SamplingParams(max_tokens=20, n=4, temperature=1.0, stop=["never said", "nor this"])
    engine.generate([1, 2, 3], params)
    me = threading.get_ident()
    assert [(thread, stops) for thread, stops in built if stops] == [(me, ["never said", "nor this"])]
    assert {thread for thread, _ in built} == {me}


def test_answers_that_are_preempted_keep_their_table(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tiny("llama"), tokens=96, max_rows=3, prefill_budget=16)
    handles = [driver.add(tokens_of(9, seed=n), 40, stop=["never said"]) for n in range(3)]
    monkeypatch.setattr(StopStringTable, "__init__", lambda self, stops=(): pytest.fail("a table is built again"))
    driver.finish()
    assert driver.core.stats().preemptions and all(len(driver.result(h).token_ids) == 40 for h in handles)


def test_what_the_engines_thread_does_for_each_answer_does_not_look_at_the_parameters_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(best_of=4, logit_bias=dict.fromkeys(range(1000), 1.0), stop_token_ids=range(1000))
    request = QueuedRequest((1, 2, 3), params)
    monkeypatch.setattr(SamplingParams, "validate", lambda *_: pytest.fail("the parameters are checked again"))
    each = [request_for_answer(request, index).params for index in range(4)]
    assert all(p.logprobs == 0 and p.logit_bias is params.logit_bias for p in each)


def test_a_step_builds_the_table_of_biases_from_arrays_that_the_caller_made(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(1000), 1.0))
    monkeypatch.setattr(TokenBiases, "__iter__", lambda *_: pytest.fail("the map is gone through again"))
    BatchSampler([SamplingRow(params, 0, [1], [])] * 4, 1000)


@pytest.mark.parametrize(
    "wide",
    [
        SamplingParams(logit_bias=dict.fromkeys(range(1000), 1.0)),
        SamplingParams(repetition_penalty=1.1, repetition_context=2**31 - 1),
        SamplingParams(presence_penalty=1.0),
    ],
    ids=["bias", "repetition", "presence"],
)
def test_a_row_with_a_long_list_does_not_make_the_others_pay(wide: SamplingParams) -> None:
    """Of sixteen rows one asks: no array between the logits and the tokens has sixteen of its lists."""
    long = SamplingRow(wide, 0, list(range(900)), list(range(900)))
    rows = [long] + [SamplingRow(SamplingParams(), 0, [1], [2])] * 15
    logits = mx.zeros((16, 1000))
    sampler = BatchSampler(rows, 1000)
    change = sampler._bias or sampler._histories[0]
    widths = []
    apply = change.change.apply
    change.change.apply = lambda part: widths.append(part.shape) or apply(part)  # type: ignore[method-assign]
    sampler(logits, np.zeros(16, np.int64))
    assert widths == [(1, 1000)]
