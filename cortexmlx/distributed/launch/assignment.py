"""WorkerAssignment: what a worker is told when it starts. Without mlx."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TextIO

from cortexmlx.distributed.links.handshake import KEY_BYTES
from cortexmlx.errors import HostRefused

VARIABLE = "CORTEXMLX_WORKER"
"""The environment variable that holds an assignment. Everybody on a machine may see it, so it has no key."""

KEY_VARIABLE = "CORTEXMLX_WORKER_KEY"
"""The environment variable that holds the group's key with MPI, whose standard input reaches one rank only. Without MPI
the key is the first line of the standard input. Neither is on a command line.
"""

MEET = b"meet"
"""The controller's first message: all workers have joined, so each can meet the others by MLX."""

READY = b"ready"
"""A worker's first message: it has met the others."""

CONTROLLER_LOST = 4
"""The exit code of a worker that ended because its link did. It is not the cause: when one worker is lost, the
controller ends the links of all.
"""

TEMPORARY_FOLDER = "CORTEXMLX_WORKER_TMPDIR"
"""The user's TMPDIR, empty if there is none. While workers start, TMPDIR is the folder that is removed with them."""

_KEY_CHARACTERS = 200

_RANKS = ("MLX_RANK", "OMPI_COMM_WORLD_RANK")
"""Where MLX's launcher and Open MPI write a process's rank."""


@dataclass(frozen=True)
class WorkerAssignment:
    """Which group a worker belongs to, and where its controller listens. All workers of an epoch have the same."""

    addresses: tuple[tuple[str, int], ...]
    """Where the controller listens: IP address and port."""
    epoch: int
    ranks: int
    """How many workers there are."""
    backend: str
    seconds: float
    """How long a worker tries to reach its controller."""

    def environment_entry(self) -> str:
        """Return the assignment as `NAME=VALUE`, for a worker's environment."""
        return f"{VARIABLE}={json.dumps(asdict(self), separators=(',', ':'))}"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> WorkerAssignment:
        """Read the assignment from the environment. Raises HostRefused."""
        try:
            value = json.loads(environment[VARIABLE])
            addresses = tuple((str(host), int(port)) for host, port in value.pop("addresses"))
            return cls(addresses, **value)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise HostRefused(
                f"{VARIABLE} is not set to an assignment: workers are started by cortexmlx, with --hosts"
            ) from None


def read_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank, as its launcher wrote it. Raises HostRefused."""
    for name in _RANKS:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    raise HostRefused(f"none of {', '.join(_RANKS)} is set: workers are started by cortexmlx, with --hosts")


def read_key(environment: MutableMapping[str, str], standard_input: TextIO) -> bytes:
    """Take the group's key out of the environment, or read it from standard input. Raises HostRefused."""
    text = environment.pop(KEY_VARIABLE, None) or standard_input.readline(_KEY_CHARACTERS)
    with suppress(ValueError):
        key = bytes.fromhex(text.strip())
        if len(key) == KEY_BYTES:
            return key
    raise HostRefused("a worker needs its group's key: workers are started by cortexmlx, with --hosts")


def restore_temporary_folder(environment: MutableMapping[str, str]) -> None:
    """Make TMPDIR the user's again, on the controller's machine. MLX keeps there what it compiles for a CPU: in a new
    folder, each start would compile all of it.
    """
    if (folder := environment.pop(TEMPORARY_FOLDER, None)) is not None:
        environment["TMPDIR"] = folder
        if not folder:
            del environment["TMPDIR"]


# What must be equal on every host: the versions that the workers and the controller run.


_PACKAGES = ("cortexmlx", "mlx", "mlx-lm")


def package_versions() -> dict[str, str]:
    """Return the version of each package whose numbers or messages must agree; "none" for one that is not installed."""
    return {package: _installed_version(package) for package in _PACKAGES}


def _installed_version(package: str) -> str:
    """Return a package's version; "none" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
