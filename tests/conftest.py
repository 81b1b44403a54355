"""What the tests share: the fast BLAS where there is one, tiny models written once per session, and their judge."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from cortexmlx.cpu import blas

# MLX hands each operation to a thread of its own. On busy CPUs Linux would let that thread interrupt the one that feeds
# it, hundreds of times a step: a sixth of the CPU time of a run. As a batch job it waits for its turn.
if sys.platform == "linux":
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# The workers of a run share the CPUs, and OpenBLAS's threads wait for each other by spinning: of two workers with two
# threads each on two CPUs, a test on real weights took ten times the CPU time that it takes alone. Set for the
# programs that tests start, too.
if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, blas.usable_cpus() // workers)))

blas.preload()
# The judges that compute on a GPU need float32 products, which are TF32 on an M5 otherwise. MLX reads it at first use.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# Commands keep a store on disk: those that tests run, not in the user's own folder.
os.environ.setdefault("CORTEXMLX_KV_STORE", os.path.join(tempfile.gettempdir(), f"cortexmlx-tests-{os.getuid()}", "kv"))

# On a GPU each of hundreds of engines would time its attention, and tests would depend on what was the fastest.
os.environ.setdefault("CORTEXMLX_TIMED_CHOICE", "0")

# Hundreds of processes import the package. Where Python keeps no bytecode, each of them compiles all of it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that runs the tests in its background lets them ignore interrupts, and nohup hang-ups: their children, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes says more about what else the machine does than about the code.
anywhere = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", anywhere, max_examples=25)
settings.register_profile("thorough", anywhere)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

Tiny = Callable[[str], Path]
Greedy = Callable[[str, Sequence[int], int], list[int]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--attention NAME`: what attention "auto" means in every engine of this run, such as reference on a Mac."""
    choices = ("auto", "metal", "reference", "sim")
    parser.addoption("--attention", choices=choices, default="auto", help="of engines that do not say")


TIERS = {
    "lab": (
        *("lab", "metal", "matmul", "pictures", "house/test_ci.py"),
        *("bench/studies", "bench/suites", "bench/replay", "bench/measure"),
        *("engine/test_metal_engine.py", "engine/test_matmul_engine.py"),
    ),
    "features": (
        *("vision", "distributed", "models/sharding", "models/gguf", "models/adapters", "execution/adapters"),
        *("models/embedding", "core/embedding", "engine/test_embedding.py", "server/test_embeddings.py"),
        *("server/test_embeddings_engine.py", "server/test_images.py", "server/test_hostile_images.py"),
        *("speculation", "scheduling/test_drafts.py", "core/test_draft_model.py", "engine/test_draft_head.py"),
        *(f"engine/test_speculation{rest}.py" for rest in ("", "_known_bugs", "_known_memory_bugs")),
        *("engine/test_adapters.py", "engine/test_adapters_trials.py"),
    ),
}
"""Files and folders of tests that have a command of their own. `make test-lab`: they execute, judge or compile kernels,
or measure. `make test-features`: images, several hosts, drafts, adapters, embeddings and GGUF.
"""


def belongs_to(tier: str, path: Path) -> bool:
    """Whether a test file, or a folder of them, is of a tier."""
    name = f"{path.relative_to(Path(__file__).parent).as_posix()}/"
    return name.startswith(tuple(f"{each}/" for each in TIERS[tier]))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A tier's files are not even imported by a run that leaves it out."""
    left_out = (tier for tier in TIERS if f"not {tier}" in config.option.markexpr)
    return True if any(belongs_to(tier, collection_path) for tier in left_out) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for tier in TIERS:
            if belongs_to(tier, item.path):
                item.add_marker(tier)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: Python's garbage collector need not look at it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def attention(request: pytest.FixtureRequest) -> Iterator[None]:
    """Honours `--attention`."""
    name: str = request.config.getoption("--attention")
    with pytest.MonkeyPatch.context() as patched:
        if name != "auto":
            patched.setattr("cortexmlx.attention.backends.auto_backend_name", lambda: name)
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_store() -> Iterator[None]:
    """Engines wait for a disk as long as tests wait: what a busy machine reads and writes late is read and written."""
    from cortexmlx.disk import connector as store_connector
    from cortexmlx.disk.store import KVStore
    from support.patience import PATIENCE

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store_connector, "_CLOSING_SECONDS", PATIENCE)
        for seconds in ("MIN_DISK_WAIT_SECONDS", "FLUSH_SECONDS"):
            patched.setattr(store_connector, seconds, PATIENCE)
        patched.setattr(KVStore.close, "__defaults__", (PATIENCE,))
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_once() -> Iterator[None]:
    """Commands that tests run in this process are made once, which takes ten times as long as to run one."""
    import typer.main

    def own(command: Any) -> Any:  # a help text is changed when it is shown
        command = copy(command)
        if subcommands := getattr(command, "commands", None):
            command.commands = {name: own(each) for name, each in subcommands.items()}
        return command

    made = cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("typer.main.get_command", lambda app: own(made(app)))
        yield


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """A command that a test runs in this process, such as one with `--debug`, sets the log for itself alone."""
    loggers = [logging.getLogger(name) for name in ("", "cortexmlx", "huggingface_hub")]
    before, handlers = [logger.level for logger in loggers], loggers[0].handlers[:]
    yield
    loggers[0].handlers[:] = handlers
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A function from a name of `tiny.CONFIGS` to the folder of that model."""
    from support.models.tiny import write_tiny

    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        path = root / name.replace(" ", "-")
        return path if path.exists() else write_tiny(path, name)

    return folder


@pytest.fixture
def engine(tiny: Tiny) -> Iterator[Any]:
    """Four rows of a tiny llama with one layer; tests that want another engine have a fixture of that name."""
    from cortexmlx import Engine

    with Engine(tiny("one layer"), kv_memory="128KB", block_size=8, max_rows=4, prefill_budget=32) as opened:
        yield opened


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Commands in this test open fake engines, which are here to be asked."""
    from cortexmlx.cli import engine as engines
    from support.cli.cli_fakes import Fakes

    made = Fakes()
    monkeypatch.setattr(engines, "load_engine", made.load)
    monkeypatch.setattr(engines, "download_model", made.fetch)
    monkeypatch.setattr(engines, "check_loadable", made.check)
    return made


@pytest.fixture(scope="session")
def judged(tiny: Tiny) -> Callable[[str], Any]:
    """A function from a name of `tiny.CONFIGS` to mlx-lm's own (model, tokenizer)."""

    @cache
    def load(name: str) -> Any:
        import mlx_lm

        return mlx_lm.load(str(tiny(name)))

    return load


@pytest.fixture(scope="session")
def theirs(judged: Callable[[str], Any]) -> Greedy:
    """mlx-lm's greedy tokens: a function of model name, prompt and number of tokens."""
    from support.engine.judge import greedy

    @cache
    def answer(name: str, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        return greedy(*judged(name), prompt, max_tokens)

    return lambda name, prompt, max_tokens: answer(name, tuple(prompt), max_tokens)


@pytest.fixture
def unpaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model that is loaded now is told not to be paged, after its probe: it runs one request at a time."""
    from cortexmlx.attention.probe import NotPaged, probe_kv_specs

    def refuse(model: Any) -> Any:
        probe_kv_specs(model)
        raise NotPaged("tiny: a test wants it so")

    monkeypatch.setattr("cortexmlx.execution.execution_modes.probe_kv_specs", refuse)
