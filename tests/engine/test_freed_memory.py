"""A closed engine keeps none of MLX's memory, nor does one that was dropped or could not be opened: at once, without
Python's garbage collector, whatever the app still holds.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx import CortexError, Engine, SamplingParams
from cortexmlx.models.load import load_model
from support.drafting.draft_models import wide_tiny
from support.gguf.models import write_model
from support.models.adapters import write_adapter
from support.models.quantized_models import wide
from support.models.tiny import quantize_in_place, tokens_of, write_tiny
from support.patience import PATIENCE
from support.store.hash_gate import hash_gate

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
PROMPT = tokens_of(50, seed=2)

SMALL = 1024
"""Bytes that may stay: constants of the functions that mlx-lm compiles. The smallest model here has 70,000."""


ONE_STEP = 16 * 1024
"""Bytes of the logits and states that one step has. The arena of an engine here has 500,000."""


@contextmanager
def freed(but: int = SMALL) -> Iterator[None]:
    """What is allocated meanwhile is freed in the end, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        yield
        kept = mx.get_active_memory() - before
        assert kept < but, f"{kept} bytes are kept"
    finally:
        gc.enable()


def opened(path: Path, **settings: Any) -> Engine:
    return Engine(path, **{"kv_memory": "1MB", "block_size": 8, "max_rows": 4} | settings)


# -- models of each kind ----------------------------------------------------------------------------------------------


KINDS: dict[str, Callable[[Path, Any], tuple[Path, dict[str, Any]]]] = {
    "paged": lambda root, tiny: (tiny("llama"), {}),
    "with states": lambda root, tiny: (tiny("qwen3_5"), {}),
    "with windows": lambda root, tiny: (tiny("gemma3_text"), {}),
    "latent": lambda root, tiny: (tiny("deepseek_v2"), {}),
    "kernels": lambda root, tiny: (tiny("one layer"), {"attention": "sim"}),
    "quantized cache": lambda root, tiny: (wide(root, "llama"), {"kv_bits": 8}),
    "adapter": lambda root, tiny: (tiny("llama"), {"adapter": write_adapter(root / "adapter", tiny("llama"))}),
    "adapters": lambda root, tiny: (tiny("llama"), {"adapters": {"a": write_adapter(root / "a", tiny("llama"))}}),
    "gguf": lambda root, tiny: (write_model(root / "tiny.gguf"), {}),
    "packed": lambda root, tiny: (quantize_in_place(wide_tiny(root / "packed")), {"dequantize": False}),
    "widened": lambda root, tiny: (quantize_in_place(wide_tiny(root / "packed")), {"dequantize": True}),
    "disk": lambda root, tiny: (tiny("qwen3_5"), {"kv_store": root / "store"}),
}


@pytest.mark.parametrize(
    ("kind", "dropped"), [*((kind, bool(number % 2)) for number, kind in enumerate(KINDS)), ("paged", True)]
)
def test_an_engine_frees_its_memory(kind: str, dropped: bool, tiny: Any, tmp_path: Path) -> None:
    path, settings = KINDS[kind](tmp_path, tiny)
    with freed():
        engine = opened(path, **settings)
        handle = engine.submit(PROMPT, SHORT)
        assert len(handle.result(PATIENCE).token_ids) == 12
        if dropped:
            task = engine._worker._task
            del engine
            task.join()
        else:
            engine.close()


@pytest.mark.parametrize("dropped", [False, True], ids=["closed", "dropped"])
def test_an_engine_whose_weights_are_still_hashed_frees_its_memory(
    dropped: bool, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with freed(), hash_gate(monkeypatch) as gate:
        engine = opened(tiny("qwen3_5"), kv_store=tmp_path)
        engine.generate(PROMPT, SHORT)
        if dropped:
            task = engine._worker._task
            del engine
            task.join()
        else:
            engine.close()
        assert not gate.opened.is_set()


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_an_engine_on_mlx_lms_own_caches_frees_its_memory(name: str, tiny: Any, unpaged: None) -> None:
    with freed():
        engine = opened(tiny(name))
        engine.generate(PROMPT, SHORT)
        engine.close()


# -- what an app holds ------------------------------------------------------------------------------------------------


def test_requests_in_flight_and_all_that_was_asked_for_keep_nothing(tiny: Any) -> None:
    heard: list[Any] = []
    with freed():
        engine = opened(tiny("llama"), max_rows=16)
        pin, talk = engine.pin(PROMPT), engine.conversation()
        talk.ask("hello", SHORT)
        handles = [engine.submit(PROMPT, LONG, listener=lambda event: heard.append(engine)) for _ in range(4)]
        told = engine.submit(PROMPT, LONG, on_event=heard.append)
        stream, batch = engine.stream(PROMPT, LONG), engine.as_completed([PROMPT] * 9, LONG)
        next(stream)
        engine.close()
    assert all(handle.ended for handle in [*handles, told])
    del pin, batch


def test_streams_of_an_event_loop_keep_nothing(tiny: Any) -> None:
    async def ask() -> tuple[Engine, Any]:
        engine = await Engine.open(tiny("llama"), kv_memory="1MB")
        stream = engine.astream(PROMPT, LONG)
        await anext(stream)
        engine.close()
        return engine, stream

    with freed():
        kept = asyncio.run(ask())
    del kept


def test_an_engine_that_began_anew_frees_its_memory(tiny: Any) -> None:
    with freed():
        engine = opened(tiny("lfm2"))
        engine.generate(PROMPT, SHORT)
        engine.inspect(lambda core: core.reset())
        engine.generate(PROMPT, SHORT)
        engine.close()


@pytest.mark.parametrize("part", ["disk", "runner", "memory"])
def test_a_part_whose_end_raises_keeps_nothing_and_holds_nobody_up(part: str, tiny: Any, tmp_path: Path) -> None:
    tries: list[str] = []

    def breaks(core: Any) -> None:
        broken = core.runner.memory if part == "memory" else getattr(core, part)
        close = broken.close

        def closed() -> None:
            close()
            tries.append(part)
            if len(tries) < 100:  # else it is closed for ever
                raise OSError("it broke")

        broken.close = closed

    with freed():
        engine = opened(tiny("qwen3_5"), kv_store=tmp_path)
        engine.generate(PROMPT, SHORT)
        engine.inspect(breaks)
        engine.close()
    assert len(tries) == 1


class Kept(logging.Handler):
    """Keeps the records, as those do that send them away later."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    handler, log = Kept(), logging.getLogger("cortexmlx")
    log.addHandler(handler)
    yield handler.records
    log.removeHandler(handler)


def test_errors_that_are_kept_keep_nothing(tiny: Any, records: list[logging.LogRecord]) -> None:
    def broken(tokens: Any, logits: mx.array) -> mx.array:
        raise ValueError("it broke")

    def failing(error: BaseException) -> Callable[[Any], None]:
        def fail(core: Any) -> None:
            original = core.runner.collect

            def collect() -> Any:
                core.runner.collect = original
                arrays = [mx.zeros(1000) + 1, *core.runner.arena.arrays()]
                mx.eval(arrays)
                raise error

            core.runner.collect = collect

        return fail

    errors: list[BaseException] = []
    with freed():
        try:
            with opened(tiny("llama")) as engine:
                for raised in (None, RuntimeError("it broke"), KeyboardInterrupt()):
                    if raised is not None:
                        engine.inspect(failing(raised))
                    try:
                        engine.generate(PROMPT, SHORT if raised else SamplingParams(logits_processors=(broken,)))
                    except CortexError as error:
                        errors.append(error)
                engine.inspect(lambda core: [*core.runner.arena.arrays(), core.loaded.model][len(errors) + 1000])
        except IndexError as error:
            errors.append(error)
    assert len(errors) == 4 and len(records) == 2


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_an_error_that_a_logits_processor_caught_and_keeps_keeps_its_step_alone(name: str, tiny: Any) -> None:
    """Behind an error's frame are those of the step that called the processor."""
    errors: list[BaseException] = []

    def catching(tokens: Any, logits: mx.array) -> mx.array:
        try:
            raise ValueError("it broke")
        except ValueError as error:
            errors[:] = errors[:1] or [error]
        return logits

    with freed(but=ONE_STEP):
        engine = opened(tiny(name))
        engine.generate(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True, logits_processors=(catching,)))
        engine.close()
    assert errors


# -- not opened -------------------------------------------------------------------------------------------------------


def refuse(*_: Any) -> bool:
    return False


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


STAGES: dict[str, tuple[str, Callable[..., Any]] | dict[str, Any]] = {
    "text longer than the context": {"keep_last": 9999},
    "codes that do not fit": {"kv_bits": 8},
    "too little memory for a block": {"kv_memory": 10},
    "an unknown backend": {"attention": "none"},
    "no memory for the arena": ("cortexmlx.kv.arena.can_allocate", refuse),
    "an interrupt in the weights": ("cortexmlx.models.weights.convert_to_float32", interrupt),
    "an interrupt in the probe": ("cortexmlx.execution.execution_modes.probe_kv_specs", interrupt),
    "an interrupt in the runner": ("cortexmlx.execution.runner.OutputProjection", interrupt),
    "an interrupt behind the runner": ("cortexmlx.core.in_process_model.model_info", interrupt),
    "an interrupt of the books": ("cortexmlx.core.core.Measurements", interrupt),
    "an interrupt of the constructor": ("cortexmlx.engine.SharedTokenizer", interrupt),
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_that_cannot_be_opened_keeps_nothing(
    stage: str, tiny: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever catches the error may keep it."""
    fault = STAGES[stage]
    if isinstance(fault, tuple):
        monkeypatch.setattr(*fault)
    settings = {"kv_store": tmp_path} | (fault if isinstance(fault, dict) else {})
    with freed():
        with pytest.raises((CortexError, KeyboardInterrupt)) as caught:
            opened(tiny("llama"), **settings)
        _finish(caught.value)
    assert caught.value


def _finish(error: BaseException) -> None:
    """Wait until the engine's thread is done with what it loaded, as an interrupted constructor does not."""
    trace = error.__traceback__
    while trace is not None:
        engine = trace.tb_frame.f_locals.get("self")
        if isinstance(engine, Engine) and "_worker" in vars(engine):
            engine._worker._task.join()
        trace = trace.tb_next


@pytest.mark.parametrize("named", [False, True])
def test_an_adapter_of_another_model_leaves_nothing(named: bool, tiny: Any, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny("qwen3"), keys=("self_attn.q_proj",))
    with freed(), pytest.raises(CortexError) as caught:
        opened(tiny("gpt2"), **({"adapters": {"style": adapter}} if named else {"adapter": adapter}))
    assert caught.value


def test_weights_that_are_no_numbers_leave_nothing(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "damaged")
    file = str(path / "model.safetensors")
    shapes = {name: array.shape for name, array in mx.load(file).items()}
    mx.save_safetensors(file, {name: mx.full(shape, np.nan) for name, shape in shapes.items()})
    with freed(), pytest.raises(CortexError, match="NaN") as caught:
        opened(path)
    assert caught.value


@pytest.mark.parametrize(("load", "step"), [(opened, 1), (opened, 2), (opened, 3), (load_model, 2)])
def test_a_progress_bar_that_raises_leaves_nothing(load: Callable[..., Any], step: int, tiny: Any) -> None:
    """Though the error is kept."""

    def stop(progress: Any) -> None:
        if progress.total and progress.done == step:
            raise KeyboardInterrupt

    with freed(), pytest.raises(KeyboardInterrupt) as caught:
        load(tiny("llama"), on_progress=stop)
    assert caught.value
