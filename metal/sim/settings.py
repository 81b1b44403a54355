"""How launches are simulated, per context: checked or fast, with which seed, which faults to let pass; and recording."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from .report import Fault, LaunchReport


@dataclass(frozen=True)
class Settings:
    """`checked` watches every access (about 50 times slower); `coalescing` also groups accesses by simdgroup.

    `seed` decides the order of threads and threadgroups. Faults in `allow` are reported but do not raise.
    """

    checked: bool = True
    coalescing: bool = False
    address_spaces: bool = True
    seed: int = 0
    allow: frozenset[Fault] = frozenset()


@dataclass
class Recording:
    """The reports of the launches inside a `recording()` block, in order."""

    launches: list[LaunchReport] = field(default_factory=list)

    @property
    def last(self) -> LaunchReport:
        """The most recent launch."""
        return self.launches[-1]


_settings: ContextVar[Settings] = ContextVar("sim_settings", default=Settings())
_recordings: ContextVar[tuple[Recording, ...]] = ContextVar("sim_recordings", default=())


def current() -> Settings:
    """The settings in force here."""
    return _settings.get()


@contextmanager
def options(**changes: Any) -> Iterator[Settings]:
    """Change fields of Settings for the launches inside the block."""
    token = _settings.set(replace(_settings.get(), **changes))
    try:
        yield _settings.get()
    finally:
        _settings.reset(token)


@contextmanager
def recording(coalescing: bool = True) -> Iterator[Recording]:
    """Collect a LaunchReport for every launch inside the block, with coalescing measured unless told otherwise."""
    made = Recording()
    token = _recordings.set((*_recordings.get(), made))
    try:
        with options(coalescing=coalescing):
            yield made
    finally:
        _recordings.reset(token)


def record(report: LaunchReport) -> None:
    """Give a report to every open recording."""
    for open_recording in _recordings.get():
        open_recording.launches.append(report)
