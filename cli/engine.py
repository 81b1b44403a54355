"""Open the engine of a command, and replace that of a chat by another one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import exit_immediately
from cortexmlx.cli.terminal.progress import loading_progress
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import CortexError, EngineClosed
from cortexmlx.models.resolve import resolve_model
from cortexmlx.types.progress import OnProgress

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


@contextmanager
def open_engine(config: EngineConfig, interrupt_note: str = "") -> Iterator[Engine]:
    """Load the model with a progress bar on stderr. Close the engine at the end of the context. Ctrl-C while it loads
    ends the process, with a note if there is one.
    """
    try:
        engine = _load_with_progress(config)
    except KeyboardInterrupt:  # nothing can be lost yet, and the thread would load to the end
        if interrupt_note:
            console.print_note(interrupt_note)
        exit_immediately()
    with engine:
        yield engine


def load_engine(config: EngineConfig) -> Engine:
    """Load and return an engine with these options."""
    from cortexmlx.engine import Engine

    return Engine(**vars(config))


def download_model(model: str | Path, on_progress: OnProgress, draft: str | Path | None = None) -> None:
    """Download the files of a model, and of its draft model, if they are missing here. Raises what `load_model` does
    if one of them cannot be found.
    """
    from cortexmlx.models.load import fetch_draft, fetch_model

    fetch_model(resolve_model(model), on_progress)
    if draft is not None:
        fetch_draft(draft, model, on_progress)


def _load_with_progress(config: EngineConfig) -> Engine:
    """Load an engine with a progress bar."""
    with loading_progress(str(config.model)) as on_progress:
        return load_engine(replace(config, on_progress=on_progress))


def check_loadable(config: EngineConfig, on_progress: OnProgress) -> dict[str, Exception]:
    """Check whether an engine with these options could read its files. A missing model is downloaded. Return the
    adapters of `config.adapters` that cannot be read, with the reasons.

    Raises what opening the engine raises for a model, a draft model or an only adapter whose files are not there, are
    cut short, or are not supported.
    """
    from cortexmlx.models.adapters.files import read_adapter
    from cortexmlx.models.adapters.low_rank import read_low_rank_adapter
    from cortexmlx.models.load import check_model, find_head_folder

    check_model(config.model, on_progress)
    draft = config.active_draft
    if draft is not None and find_head_folder(draft, config.model, on_progress) is None:
        check_model(draft, on_progress)
    if config.adapter is not None:
        read_adapter(config.adapter)
    limits, unreadable = config.adapter_limits, dict[str, Exception]()
    for name, folder in (config.adapters or {}).items():
        try:
            read_low_rank_adapter(name, folder, limits.rank, limits.bytes)
        except CortexError as error:
            unreadable[name] = error
    return unreadable


class ReplaceableEngine:
    """An open engine that can be replaced by one with other options. Only one is open at a time, since two models may
    not fit into memory.

    In the context `ignore_interrupt`, one Ctrl-C raises nothing. It is for work that must be done before the Ctrl-C
    counts.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.ignore_interrupt: Callable[[], AbstractContextManager[object]] = nullcontext
        self.is_open = True
        """False after a replacement that could not open the old engine again. `engine` is closed then."""
        self.left_out: dict[str, Exception] = {}
        """The adapters that the last `replace_engine` could not load again with the old options, with the reasons."""
        self._stack = ExitStack()
        self.engine = self._stack.enter_context(open_engine(config))

    def check(self, config: EngineConfig) -> dict[str, Exception]:
        """Check like `check_loadable` whether these options could be loaded. The open engine is not affected."""
        with loading_progress(str(config.model)) as on_progress:
            return check_loadable(config, on_progress)

    def replace_engine(self, config: EngineConfig) -> None:
        """Close the engine and open another one as `engine`. Call `check` first, which finds most of what may fail.

        If opening fails or is interrupted, an engine with the old options is opened and the error is raised. Adapters
        that cannot be loaded any more are `left_out` of it. Raises EngineClosed if the old options fail, too: then no
        engine is open, and another replacement may open one.
        """
        self.left_out = {}
        try:
            self.is_open = False
            self._stack.close()
            self.engine = self._stack.enter_context(_load_with_progress(config))
            self.config, self.is_open = config, True
            return
        except BaseException as error:
            failure = error
        with self.ignore_interrupt():
            if isinstance(failure, KeyboardInterrupt):
                failure.__traceback__ = (
                    None  # it holds an engine that still loads, and dropping it waits for that engine
                )
            try:
                self._reopen_old()
            except Exception as error:  # a library may raise anything on broken model files
                reason = str(error) if isinstance(error, CortexError) else f"{type(error).__name__}: {error}"
                raise EngineClosed(f"{self.config.model} cannot be opened again: {reason}") from error
        raise failure

    def _reopen_old(self) -> None:
        """Open an engine with the old options, and with those of the old adapters that can still be loaded."""
        folders = self.config.adapters
        config = self.config if folders is None else replace(self.config, adapters={})
        self.engine = self._stack.enter_context(_load_with_progress(config))
        self.is_open = True
        for name, folder in (folders or {}).items():
            try:
                self.engine.load_adapter(name, folder)
            except Exception as error:
                self.left_out[name] = error
        if self.left_out:
            loaded_adapters = {name: folder for name, folder in (folders or {}).items() if name not in self.left_out}
            self.config = replace(self.config, adapters=loaded_adapters)

    def __enter__(self) -> ReplaceableEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def why_no_images(engine: Engine) -> str:
    """Return why the model sees no images, with what to do; empty if it sees them."""
    if engine.sees_images:
        return ""
    notes = [note.partition(": ")[2] for note in engine.info.notes if note.startswith("images are not seen: ")]
    return f"{engine.info.name} sees none{f': {notes[0]}' if notes else ''}"


def print_notes(engine: Engine) -> None:
    """Print the model's notes, a line each, on a terminal. They say what was done to the model, which files beside it
    are unused, and why it runs one request at a time, if so.
    """
    if console.is_terminal(sys.stderr):
        for remark in engine.info.notes:
            console.print_note(remark)
