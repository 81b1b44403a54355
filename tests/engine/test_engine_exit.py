"""However a program ends, it ends: with its own exit code, and no abort of an engine thread under a dying
interpreter.
"""

from __future__ import annotations

import signal
import threading
import time
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
from support.engine.core_driver import Driver, finally_nothing_lost
from support.models.tiny import tokens_of
from support.patience import PATIENCE
from support.programs import ended, start

LONG = "SamplingParams(max_tokens=480, ignore_eos=True)"


@pytest.mark.parametrize(
    ("program", "code", "last"),
    [
        (f"e = engine(); h = e.submit([1, 2, 3], {LONG}); next(iter(h))", 0, ""),
        pytest.param(
            f"e = engine(); s = e.stream([1, 2], {LONG}); next(s); raise KeyError('mine')",
            1,
            "KeyError: 'mine'",
            marks=pytest.mark.slow,
        ),
        (
            "import threading\ne = engine()\n"
            "threading.Thread(target=lambda: print(e.generate([5], max_tokens=99, ignore_eos=True).text)).start()",
            0,
            "",
        ),
    ],
    ids=["in flight", "an error", "waiting in a thread"],
)
def test_a_program_ends_with_its_own_exit_code(program: str, code: int, last: str, tiny: Any) -> None:
    process = start(program, tiny("llama"))
    _, errors = ended(process)
    assert process.returncode == code, errors
    assert last in (errors.strip().splitlines() or [""])[-1]
    assert code == 1 or not errors


def test_ctrl_c_in_generate_cancels_the_request_and_leaves_the_engine_usable(tiny: Any) -> None:
    program = """
from support.engine.held import hold_long_answers
e = engine()
def begun(tokens, logits):
    print("begun", flush=True)
    return logits
let_go = hold_long_answers(e, tokens=1)
try:
    e.generate([1, 2, 3], SamplingParams(max_tokens=480, ignore_eos=True, logits_processors=(begun,)))
except KeyboardInterrupt:
    pass
let_go()
print(len(e.generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True)).token_ids))
import time
while e.stats().rows_running: time.sleep(0.01)
print("ended")
"""
    process = start(program, tiny("llama"))
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    output, errors = ended(process)
    # One more token may have begun before the signal arrived. Those after it are held.
    assert (process.returncode, output.removeprefix("begun\n"), errors) == (0, "5\nended\n", "")


def test_two_engines_at_once_do_not_disturb_each_other(tiny: Any, theirs: Any) -> None:
    prompts = [tokens_of(n, seed=n) for n in (5, 18, 33)]
    params = SamplingParams(max_tokens=30)
    with Engine(tiny("llama"), kv_memory="256KB") as one, Engine(tiny("gemma3_text"), kv_memory="256KB") as two:
        pairs = [(one.submit(p, params), two.submit(p, params)) for p in prompts]
        for prompt, (first, second) in zip(prompts, pairs, strict=True):
            assert list(first.result(PATIENCE).token_ids) == theirs("llama", prompt, 30)
            assert list(second.result(PATIENCE).token_ids) == theirs("gemma3_text", prompt, 30)


def test_one_engine_serves_many_threads(tiny: Any) -> None:
    """Some wait, some stream, some cancel, some ask for stats; everybody gets the tokens they would get alone."""
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    prompts = [tokens_of(4 + 5 * i, seed=i) for i in range(6)]
    errors: list[BaseException] = []
    with Engine(tiny("llama"), kv_memory="128KB", block_size=8, max_rows=3) as engine:
        alone = [engine.generate(p, params).token_ids for p in prompts]

        def work(i: int) -> None:
            try:
                for turn in range(4):
                    prompt, wanted = prompts[(i + turn) % 6], alone[(i + turn) % 6]
                    if turn % 2:
                        assert tuple(e.token_id for e in engine.stream(prompt, params))[:-1] == wanted
                    else:
                        assert engine.generate(prompt, params).token_ids == wanted
                    cancelled = engine.submit(prompt, params)
                    cancelled.cancel()
                    assert cancelled.result(PATIENCE).token_ids == wanted[: len(cancelled.result().token_ids)]
                    assert engine.stats().rows_running <= 3
                    engine.encode("the end")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not errors, errors[0]
        finally_nothing_lost(engine)


def test_closing_from_many_threads_while_others_ask(tiny: Any) -> None:
    from cortexmlx import CortexError

    engine = Engine(tiny("llama"), kv_memory="128KB", block_size=8, max_rows=3)
    ended = []

    def ask() -> None:
        try:
            while True:
                engine.generate([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
        except CortexError as error:
            ended.append(type(error).__name__)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    closers = [threading.Thread(target=engine.close) for _ in range(3)]
    for thread in closers:
        thread.start()
    for thread in [*threads, *closers]:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert ended == ["EngineClosed"] * 4


# -- What a request makes the engine's thread do, for which all others wait -------------------------------------------


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
