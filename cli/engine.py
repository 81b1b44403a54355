"""Opening an engine for a command: the one place of the command line that leads to mlx."""

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
    """Load the model with a progress bar on stderr, and close the engine when the command is done with it."""
    try:
        engine = _loaded(config)
    except KeyboardInterrupt:  # nothing has begun that could be lost, and the engine's thread would load to the end
        leave_now()
    with engine:
        yield engine


def load(config: EngineConfig) -> Engine:
    """The engine itself."""
    from cortexmlx.engine import Engine

    return Engine(**vars(config))


def bring(model: str | Path, on_progress: OnProgress) -> None:
    """Have the files of a model on this machine. Raises what `load_model` raises for one that is not to be had."""
    from cortexmlx.models.load import fetch_model

    fetch_model(resolve(model), on_progress)


def _loaded(config: EngineConfig) -> Engine:
    """With a progress bar."""
    with loading(str(config.model)) as on_progress:
        return load(replace(config, on_progress=on_progress))


class OpenEngine:
    """An engine that can be exchanged for one with other options: two models at once may be more than memory holds.

    In the context `undisturbed` one Ctrl-C raises nothing, for what has to be done before it can be obeyed.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.undisturbed: Callable[[], AbstractContextManager[object]] = nullcontext
        self._stack = ExitStack()
        self.engine = self._stack.enter_context(open_engine(config))

    def exchange(self, config: EngineConfig) -> None:
        """Close the engine and open another, in `engine`. A model that is not here is downloaded before that. If it
        fails, or is interrupted, an engine as before is opened, and the error raised; EngineClosed, if not even that
        is possible.
        """
        if config.model != self.config.model:
            with loading(str(config.model)) as on_progress:
                bring(config.model, on_progress)
        try:
            self._stack.close()
            self.engine = self._stack.enter_context(_loaded(config))
            self.config = config
            return
        except BaseException as error:
            failure = error
        with self.undisturbed():
            if isinstance(failure, KeyboardInterrupt):
                failure.__traceback__ = None  # holds an engine that still loads: once dropped, it is waited for
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
    """What the user should know of the model, a line each, where a person looks: what was done to it, what lies beside
    it unused, why it runs one request at a time.
    """
    if console.is_terminal(sys.stderr):
        for remark in engine.info.notes:
            console.note(remark)
