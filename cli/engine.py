"""Opening an engine for a command: the one place of the command line that leads to mlx."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import leave_now
from cortexmlx.cli.terminal.loading import loading
from cortexmlx.errors import CortexError, EngineClosed
from cortexmlx.models.resolve import resolve
from cortexmlx.serving.config import EngineConfig

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[Engine]:
    """Load the model with a progress bar on stderr, and close the engine when the command is done with it."""
    try:
        with loading(str(config.model)) as on_progress:
            from cortexmlx.engine import Engine

            engine = Engine(**vars(replace(config, on_progress=on_progress)))
    except KeyboardInterrupt:  # nothing has begun that could be lost, and the engine's thread would load to the end
        leave_now()
    with engine:
        yield engine


class OpenEngine:
    """An engine that can be exchanged for one with other options: two models at once may be more than memory holds."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._stack = ExitStack()
        self.engine = self._stack.enter_context(open_engine(config))

    def exchange(self, config: EngineConfig) -> None:
        """Close the engine and open another, in `engine`. If that fails, one as before is opened, and its error raised;
        EngineClosed, if not even that is possible.
        """
        if config.model != self.config.model:
            resolve(config.model)  # a name that is none costs nothing
        self._stack.close()
        try:
            self.engine = self._stack.enter_context(open_engine(config))
            self.config = config
        except Exception:
            try:
                self.engine = self._stack.enter_context(open_engine(self.config))
            except CortexError as error:
                raise EngineClosed(f"{self.config.model} cannot be opened again: {error}") from error
            raise

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
