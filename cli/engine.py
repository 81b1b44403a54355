"""Open an engine for a command. Only this module of the command line imports mlx."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import leave_now
from cortexmlx.cli.terminal.progress import loading
from cortexmlx.errors import CortexError, EngineClosed
from cortexmlx.models.resolve import resolve
from cortexmlx.progress import OnProgress
from cortexmlx.serving.config import EngineConfig

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[Engine]:
    """Load the model with a progress bar on stderr. Close the engine at the end of the context."""
    try:
        engine = _loaded(config)
    except KeyboardInterrupt:  # nothing can be lost yet, and the thread would load to the end
        leave_now()
    with engine:
        yield engine


def load(config: EngineConfig) -> Engine:
    """Return the engine."""
    from cortexmlx.engine import Engine

    return Engine(**vars(config))


def fetch(model: str | Path, on_progress: OnProgress) -> None:
    """Download the files of a model that is not on this machine. Raises what `load_model` raises for a model that
    cannot be found.
    """
    from cortexmlx.models.load import fetch_model

    fetch_model(resolve(model), on_progress)


def _loaded(config: EngineConfig) -> Engine:
    """Load an engine with a progress bar."""
    with loading(str(config.model)) as on_progress:
        return load(replace(config, on_progress=on_progress))


class OpenEngine:
    """An engine that can be replaced by one with other options. Only one is open at a time, since two models may not
    fit into memory.

    In the context `undisturbed`, one Ctrl-C raises nothing. It is for work that must be done before the Ctrl-C counts.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.undisturbed: Callable[[], AbstractContextManager[object]] = nullcontext
        self._stack = ExitStack()
        self.engine = self._stack.enter_context(open_engine(config))

    def exchange(self, config: EngineConfig) -> None:
        """Close the engine and open another one as `engine`. A missing model is downloaded first.

        If opening fails or is interrupted, an engine with the old options is opened and the error is raised. Raises
        EngineClosed if the old options fail, too.
        """
        if config.model != self.config.model:
            with loading(str(config.model)) as on_progress:
                fetch(config.model, on_progress)
        try:
            self._stack.close()
            self.engine = self._stack.enter_context(_loaded(config))
            self.config = config
            return
        except BaseException as error:
            failure = error
        with self.undisturbed():
            if isinstance(failure, KeyboardInterrupt):
                failure.__traceback__ = (
                    None  # it holds an engine that still loads, and dropping it waits for that engine
                )
            try:
                self.engine = self._stack.enter_context(_loaded(self.config))
            except CortexError as error:
                raise EngineClosed(f"{self.config.model} cannot be opened again: {error}") from error
        raise failure

    def __enter__(self) -> OpenEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def tell(engine: Engine) -> None:
    """Print the model's notes, a line each, if a person looks. They say what was done to the model, which files beside
    it are unused, and why it runs one request at a time.
    """
    if console.is_terminal(sys.stderr):
        for remark in engine.info.notes:
            console.note(remark)
