"""Exceptions that are thrown at the engine's thread: its requests fail with a typed error, and it goes on."""

from __future__ import annotations

from asyncio import CancelledError
from contextlib import suppress
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx import (
    CortexError,
    Engine,
    EngineClosed,
    LogitsProcessorError,
    OutOfMemory,
    RequestHandle,
    SamplingParams,
)
from support.engine.asked import LONG, PROMPT, SHORT
from support.engine.core_driver import assert_nothing_lost, finally_nothing_lost
from support.engine.held import hold_long_answers
from support.models.tiny import tokens_of
from support.patience import PATIENCE, soon


def wait_until_it_has_recovered(engine: Engine) -> None:
    """Whoever asks while the exception is on its way is told of it, too."""

    def answers() -> bool:
        try:
            engine.stats()
        except CortexError:
            return False
        return True

    assert soon(answers), "the engine never answers again"


@pytest.mark.parametrize(
    ("part", "kind"),
    zip(
        ("plan", "dispatch", "collect", "commit", "books", "tidy", "cancel"),
        (KeyboardInterrupt, SystemExit, GeneratorExit) * 3,
        strict=False,
    ),
)
def test_an_interrupt_in_any_part_fails_its_requests_and_the_engine_goes_on(
    tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch, part: str, kind: type[BaseException]
) -> None:
    with Engine(tiny("one layer"), kv_memory="32KB", block_size=8, max_rows=3, prefill_budget=32) as engine:
        core = engine._worker.core
        owner, name = {
            "plan": (core.scheduler, "plan"),
            "dispatch": (core.runner, "dispatch"),
            "collect": (core.runner, "collect"),
            "commit": (core.scheduler, "commit"),
            "books": (core.cache, "append"),
            "tidy": (core, "tidy"),
            "cancel": (core, "cancel"),
        }[part]
        original, thrown = getattr(owner, name), []

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not thrown:
                thrown.append(name)
                raise kind
            return result

        let_go = hold_long_answers(engine, tokens=1)
        handles = [engine.submit(tokens_of(n, seed=n), LONG) for n in (30, 9, 40)]
        for handle in handles:
            next(iter(handle))
        waiting = engine.submit(PROMPT, LONG)
        monkeypatch.setattr(owner, name, call)
        if part in ("tidy", "cancel"):
            for handle in [*handles, waiting]:
                handle.cancel()
        with suppress(CortexError):  # who asks while it is interrupted is told of that
            let_go()
        for handle in [*handles, waiting]:
            try:
                handle.result(PATIENCE)
            except CortexError as error:
                assert kind.__name__ in str(error)
        assert soon(lambda: thrown)
        if part not in ("tidy", "cancel"):
            assert all(handle._error is not None for handle in [*handles, waiting])
        monkeypatch.undo()
        wait_until_it_has_recovered(engine)
        let_go()
        for n in (33, 8):
            prompt = tokens_of(n, seed=50 + n)
            assert list(engine.generate(prompt, SHORT).token_ids) == theirs("one layer", prompt, 12)
        engine.check_invariants()
        assert_nothing_lost(engine.stats())


@pytest.mark.parametrize("kind", [KeyboardInterrupt, CancelledError])
def test_what_an_apps_functions_raise_on_the_engines_thread_ends_their_own_request_alone(
    engine: Engine, kind: type[BaseException]
) -> None:
    def interrupt(*_: Any) -> Any:
        raise kind("mine")

    other = engine.submit(PROMPT, LONG)
    with pytest.raises(CortexError, match=f"listener.*{kind.__name__}"):
        engine.submit(PROMPT, SHORT, listener=interrupt).result(PATIENCE)
    with pytest.raises(LogitsProcessorError, match=kind.__name__):
        engine.generate(PROMPT, SamplingParams(logits_processors=[interrupt]))
    with pytest.raises(kind, match="mine"):
        engine.inspect(interrupt)
    assert len(other.result(PATIENCE).token_ids) == 400
    engine.check_invariants()
    finally_nothing_lost(engine)


def test_a_question_that_is_interrupted_is_answered_with_an_error(tiny: Any) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with Engine(tiny("one layer"), kv_memory="32KB", block_size=8) as engine:
        with pytest.raises(CortexError, match="KeyboardInterrupt"):
            engine._worker.ask(interrupt)
        assert engine.stats().rows_running == 0


def test_an_engine_that_cannot_begin_anew_closes(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError

    engine = Engine(tiny("one layer"), kv_memory="32KB", block_size=8)
    hold_long_answers(engine)
    handle = engine.submit(PROMPT, LONG)
    next(iter(handle))
    monkeypatch.setattr(engine._worker.core, "reset", broken)
    monkeypatch.setattr(engine._worker.core, "step", lambda: exec("raise KeyboardInterrupt"))
    with pytest.raises(CortexError, match="KeyboardInterrupt"):
        handle.result(PATIENCE)
    engine._worker._task.join()
    with pytest.raises(EngineClosed):
        engine.generate(PROMPT)
    engine.close()


def interrupted_step(core: Any) -> None:
    """From now on: it is lost with all that it has begun."""
    vars(core).pop("step", None)  # it was held
    step = core.step

    def interrupted() -> None:
        step()
        raise KeyboardInterrupt

    core.step = interrupted


def full(engine: Engine) -> RequestHandle:
    """A request that runs, and goes no farther, when the arena has all blocks that it may have."""
    hold_long_answers(engine)
    engine.generate_batch([tokens_of(400, seed=i) for i in range(8)], SamplingParams(max_tokens=1))
    handle = engine.submit(PROMPT, LONG)
    next(iter(handle))
    stats = engine.stats()
    assert stats.kv_bytes > 0.9 * stats.kv_bytes_limit
    return handle


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_an_engine_that_begins_anew_never_has_two_arenas(tiny: Any, name: str) -> None:
    """It would take twice the KV memory, on a machine that may have no more."""
    with Engine(tiny(name), kv_memory="1MB", block_size=8) as engine:
        handle = full(engine)

        def begin(core: Any) -> tuple[int, int]:
            mx.synchronize()
            mx.reset_peak_memory()
            interrupted_step(core)
            return mx.get_active_memory(), core.runner.bytes.arena + core.runner.bytes.states

        active, arena = engine.inspect(begin)
        with pytest.raises(CortexError, match="KeyboardInterrupt"):
            handle.result(PATIENCE)
        engine.inspect(lambda core: core.__dict__.pop("step"))
        assert mx.get_peak_memory() <= active + arena // 8, f"{mx.get_peak_memory() - active} of {arena} bytes more"
        assert len(engine.generate(PROMPT, SHORT).token_ids) == 12


def test_an_engine_that_gets_no_memory_to_begin_anew_serves_when_there_is_some(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tiny("llama"), kv_memory="1MB", block_size=8) as engine:
        handle = full(engine)
        before = mx.get_active_memory()
        with monkeypatch.context() as patch:
            patch.setattr("cortexmlx.kv.arena.can_allocate", lambda size: False)
            engine.inspect(interrupted_step)
            with pytest.raises(CortexError, match=r"interrupted by KeyboardInterrupt.*: ask again"):
                handle.result(PATIENCE)
            engine.inspect(lambda core: vars(core).pop("step"))
            with pytest.raises(OutOfMemory, match=r"the system refuses .* for the KV cache"):
                engine.generate(PROMPT, SHORT)
            assert mx.get_active_memory() < before - 900_000
        assert len(engine.generate(PROMPT, SHORT).token_ids) == 12


def test_on_progress_that_raises_fails_the_load_and_keeps_the_thread(tiny: Any) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Engine(tiny("one layer"), kv_memory="32KB", on_progress=stop)
    with Engine(tiny("one layer"), kv_memory="32KB") as engine:
        assert len(engine.generate(PROMPT, SHORT).token_ids) == 12
