"""Kernels are compiled and checked beside the loading of a model, and never in an answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.attention import backends
from cortexmlx.attention.backends import kernel_backend
from cortexmlx.attention.metal import MetalAttention
from cortexmlx.attention.selfcheck import KernelCheck
from cortexmlx.attention.tail_write import TailWriter
from cortexmlx.core.in_process_model import THREADS, KernelWarmUp
from cortexmlx.core.threads import MlxTask
from cortexmlx.errors import EngineClosed
from cortexmlx.metal.lab import sim
from cortexmlx.types.progress import Progress
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of, write_tiny
from support.patience import PATIENCE


class Compilations:
    """What MLX would have compiled. The key is MLX's own: the whole generated text, with a name that has the template's
    arguments, and the address space and the dtype of each input.

    `seconds` is what each compilation takes. As in MLX, one is made at a time.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.threads: list[int] = []
        """The thread of each compilation."""
        self.begun = threading.Event()
        self.dry = False
        """Whether launches give zeros from now on, because only what they compile matters."""
        self._texts: set[str] = set()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self._texts)

    def factory(self, **options: Any) -> Callable[..., list[mx.array]]:
        """Takes the arguments of `mx.fast.metal_kernel`."""
        kernel = sim.metal_kernel(**options)

        def call(**given: Any) -> list[mx.array]:
            text = kernel.text(given["inputs"], given["output_dtypes"], given["template"]).text
            with self._lock:
                if text not in self._texts:
                    self.begun.set()
                    time.sleep(self.seconds)
                    self.threads.append(threading.get_ident())
                    self._texts.add(text)
            if self.dry:
                return [mx.zeros(s, d) for s, d in zip(given["output_shapes"], given["output_dtypes"], strict=True)]
            return list(kernel(**given))

        return call


GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
ROWS = 9
"""With one head of one row and 8 numbers, an input is as small as it gets: from 1 to 9 rows it crosses 8 elements."""


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    """What is compiled matters here, not what the kernels access."""
    with sim.options(checked=False):
        yield


def on(made: Compilations, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines run the kernels of a factory, as on a Mac."""
    monkeypatch.setattr(
        "cortexmlx.execution.execution_modes.choose_backend",
        lambda name: kernel_backend("metal", MetalAttention(made.factory), TailWriter(made.factory)),
    )


@pytest.mark.parametrize(
    ("name", "changes", "config", "kernels"),
    [
        ("windowed llama", {}, {}, "prefill kernel, vector kernel"),
        pytest.param(
            "gpt_oss",
            {"num_attention_heads": 1, "num_key_value_heads": 1},
            {},
            "prefill kernel, vector kernel",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama",
            {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 1},
            {"kv_bits": 8},
            "matrix kernel",
            marks=pytest.mark.slow,
        ),
        ("deepseek_v3", {"kv_lora_rank": 128, "qk_rope_head_dim": 64}, {}, "wide kernel"),
    ],
    ids=["window", "sinks, one head", "quantized", "latent"],
)
def test_after_opening_nothing_is_compiled_whatever_the_rows_and_lengths_are(
    name: str, changes: dict[str, Any], config: dict[str, Any], kernels: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    made = Compilations()
    on(made, monkeypatch)
    driver = Driver(write_tiny(tmp_path, name, **changes), tokens=1024, max_rows=ROWS, **config)
    compiled = made.count
    assert compiled >= 2 and threading.get_ident() not in made.threads
    made.dry = True
    for rows in (1, 2, 4, 5, ROWS):
        driver.answers([tokens_of(length, seed=length) for length in range(1, 4 * rows, 4)], 2)
    driver.answers([tokens_of(n, seed=n) for n in (1, 40)], 34)  # two decode windows and what follows them
    assert made.count == compiled, "a step compiled"
    assert driver.core.backend.notes() == () and driver.core.stats().attention_backend == f"metal, {kernels}"


def test_the_first_token_waits_for_no_compilation(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that takes half a second has been asked before the constructor returns, and is not asked again."""
    made, news = Compilations(seconds=0.5), list[Progress]()
    on(made, monkeypatch)
    with Engine(tiny("windowed llama"), kv_memory="4MB", on_progress=news.append) as engine:
        compiled = made.count
        engine.generate(tokens_of(5), GREEDY)
        engine.generate(tokens_of(30), GREEDY)
    assert made.count == compiled == 5
    assert len(set(made.threads)) <= THREADS + 1, "the kernel that writes the tail is known when the runner is there"
    told = [n for n in news if n.what == "compiling"]
    assert [n.done for n in told] == sorted(n.done for n in told)
    assert (told[-1].done, told[-1].total, told[-1].unit) == (3, 3, "kernels")


def test_compiling_begins_before_the_weights_are_read(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Compilations()
    on(made, monkeypatch)
    monkeypatch.setattr("cortexmlx.core.in_process_model.auto_backend_name", lambda: "metal")
    seen = []
    monkeypatch.setattr(
        "cortexmlx.models.folder._check_weight_types", lambda folder, model: seen.append(made.begun.wait(PATIENCE))
    )
    with Engine(tiny("llama"), kv_memory="4MB") as engine:
        compiled = made.count
        engine.generate(tokens_of(5), GREEDY)
        assert seen == [True] and made.count == compiled


def test_the_reference_path_looks_for_no_kernels(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(model: Any) -> Any:
        raise AssertionError("this costs a pass")

    monkeypatch.setattr(backends, "probe_attention_calls", never)
    news: list[Progress] = []
    with Engine(tiny("llama"), kv_memory="4MB", attention="reference", on_progress=news.append) as engine:
        engine.generate(tokens_of(5), GREEDY)
    assert {n.what for n in news} == {"loading"}


def test_a_load_that_ends_while_kernels_are_compiled_does_not_wait_for_them(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Cancel button, or a closed engine: the next progress raises, and the checks that have not begun never do."""
    begun, go_on, later = threading.Event(), threading.Event(), list[int]()

    def blocked() -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    checks = [KernelCheck("blocked", blocked)] * THREADS + [KernelCheck("later", lambda: later.append(1))]
    monkeypatch.setattr("cortexmlx.execution.execution_modes.PagedMode.kernel_checks", lambda *_: checks)
    made: list[KernelWarmUp] = []

    def making() -> KernelWarmUp:
        made.append(KernelWarmUp())
        return made[-1]

    monkeypatch.setattr("cortexmlx.core.in_process_model.KernelWarmUp", making)

    def cancel(news: Progress) -> None:
        if news.what == "compiling":
            assert begun.wait(PATIENCE)
            raise EngineClosed("cancelled")

    with pytest.raises(EngineClosed, match="cancelled"):
        Engine(tiny("llama"), kv_memory="4MB", on_progress=cancel)
    assert not go_on.is_set()
    go_on.set()
    for task in made[-1]._tasks:
        task.join()
    assert len(made[-1]._tasks) == THREADS and later == []


def test_a_check_that_raises_is_left_to_the_first_use(caplog: pytest.LogCaptureFixture) -> None:
    done = []

    def raising() -> None:
        raise MemoryError("none is left")

    warm_up = KernelWarmUp([KernelCheck("a variant", raising)] + [KernelCheck("another", lambda: done.append(1))] * 3)
    news: list[Progress] = []
    with caplog.at_level(logging.ERROR, "cortexmlx"):
        warm_up.finish(news.append)
    assert len(done) == 3 and "attention (a variant) could not be checked" in caplog.text
    assert (news[-1].done, news[-1].total) == (4, 4)
    warm_up.stop()
    warm_up.finish(news.append)


@pytest.mark.parametrize("started", [0, 1])
def test_checks_are_left_to_the_first_use_if_the_system_starts_no_thread(
    started: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left, start = [True] * started, MlxTask.start

    def starting(task: MlxTask) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(task)

    monkeypatch.setattr(MlxTask, "start", starting)
    done, news = [], list[Progress]()
    warm_up = KernelWarmUp([KernelCheck(str(n), lambda: done.append(1)) for n in range(3)])
    warm_up.finish(news.append)
    assert len(done) == 3 * started and "can't start new thread" in caplog.text
    assert news[-1].done == news[-1].total == 3


def test_without_checks_there_are_no_threads_and_no_progress() -> None:
    before = threading.active_count()
    warm_up = KernelWarmUp(())
    warm_up.finish(lambda news: pytest.fail("there is nothing to tell"))
    assert threading.active_count() == before
