"""How launches are simulated: checked or fast, with which seed, which faults to let pass; and recording them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from .report import Fault, LaunchReport
from .toolchain import Build


@dataclass(frozen=True)
class Settings:
    """`checked` watches every access (two to five times slower); `coalescing` also groups accesses by simdgroup.

    `seed` decides the order of threads and threadgroups; with `lockstep` simdgroups take turns instead.
    `static_pass` asks a GPU front end whether Metal would take a text, before it is first run.
    With `poison` a launch without a fault runs once more, unchecked, with variables that start as zeros: an output that
    comes out different was computed from a variable that nothing had written.
    `patience` is for how many seconds of processor time a launch may run without any thread coming to its end.
    Faults in `allow` are reported but do not raise. With `coverage` nothing is watched but which basic blocks run.
    """

    checked: bool = True
    coalescing: bool = False
    static_pass: bool = True
    seed: int = 0
    lockstep: bool = False
    poison: bool = False
    patience: float = 60.0
    allow: frozenset[Fault] = frozenset()
    coverage: bool = False

    @property
    def build(self) -> Build:
        """What kernels are compiled for."""
        if self.coverage:
            return Build.COVERAGE
        return Build.CHECKED if self.checked else Build.FAST


@dataclass
class Recording:
    """The reports of the launches inside a `recording()` block, in order."""

    launches: list[LaunchReport] = field(default_factory=list)

    @property
    def last(self) -> LaunchReport:
        """The most recent launch."""
        return self.launches[-1]


class _State:
    """Process-wide, because kernels run on whichever thread owns MLX."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.recordings: tuple[Recording, ...] = ()


_state = _State()


def current() -> Settings:
    """The settings in force here."""
    return _state.settings


@contextmanager
def options(**changes: Any) -> Iterator[Settings]:
    """Change fields of Settings for the launches inside the block."""
    before = _state.settings
    _state.settings = replace(before, **changes)
    try:
        yield _state.settings
    finally:
        _state.settings = before


@contextmanager
def recording(coalescing: bool = True) -> Iterator[Recording]:
    """Collect a LaunchReport for every launch inside the block, with coalescing measured unless told otherwise."""
    made = Recording()
    before = _state.recordings
    _state.recordings = (*before, made)
    try:
        with options(coalescing=coalescing):
            yield made
    finally:
        _state.recordings = before


def record(report: LaunchReport) -> None:
    """Give a report to every open recording."""
    for open_recording in _state.recordings:
        open_recording.launches.append(report)
