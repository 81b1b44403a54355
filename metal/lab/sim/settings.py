"""How launches are simulated (checked or fast, the seed, the allowed faults), and how their reports are recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from cortexmlx.metal.lab.sim.report import Fault, LaunchReport
from cortexmlx.metal.lab.sim.toolchain import Build


@dataclass(frozen=True)
class SimSettings:
    """How launches are simulated."""

    checked: bool = True
    """Whether every access is watched: two to five times slower."""
    coalescing: bool = False
    """Whether a checked launch also groups accesses by simdgroup."""
    static_pass: bool = True
    """Whether a GPU front end checks that Metal accepts a text, before its first run."""
    seed: int = 0
    """Decides the order of threads and threadgroups."""
    poison: bool = False
    """Whether a launch without a fault runs once more, unchecked, with zeros in uninitialised variables. An output that
    differs was computed from such a variable.
    """
    fast_errors: bool = False
    """Whether results of `metal::fast::` have errors as large as Metal allows, the same ones for the same arguments."""
    patience: float = 60.0
    """Seconds of processor time that a launch may run without any thread reaching its end."""
    allow: frozenset[Fault] = frozenset()
    """Faults that are reported but do not raise."""

    @property
    def build(self) -> Build:
        """The way to compile kernels."""
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
    """Settings and recordings of the whole process, because kernels run on whichever thread owns MLX."""

    def __init__(self) -> None:
        self.settings = SimSettings()
        self.recordings: tuple[Recording, ...] = ()


_state = _State()


def current() -> SimSettings:
    """Return the current settings."""
    return _state.settings


@contextmanager
def options(**changes: Any) -> Iterator[SimSettings]:
    """Change fields of SimSettings for the launches inside the block."""
    before = _state.settings
    _state.settings = replace(before, **changes)
    try:
        yield _state.settings
    finally:
        _state.settings = before


@contextmanager
def recording(coalescing: bool = True) -> Iterator[Recording]:
    """Collect a LaunchReport for every launch inside the block. `coalescing` decides whether coalescing is measured."""
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
