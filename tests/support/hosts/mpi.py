"""MPI for tests: the system's own, or Debian's packages unpacked into a folder of the user's cache, not installed.

`apt-get download` takes the packages from wherever the system takes its packages. Where MPI cannot be had, tests are
skipped with the reason.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from cortexmlx.distributed.group import COMPARE_SWITCH
from support.patience import PATIENCE

_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,vader",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_mca_base_component_show_load_errors": "0",
}
"""Shared memory only, and a rank that waits lets others run."""


@contextmanager
def with_mpi(folder: Path) -> Iterator[None]:
    """Let `--hosts N:mpi` work in this context, and compare the workers' plans after each step. Skips the test where
    there is no MPI.
    """
    found = mpi()
    folder.mkdir(exist_ok=True)
    (folder / "mpirun").symlink_to(found.launcher)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        for name, value in (_SETTINGS | dict(found.environment)).items():
            patch.setenv(name, value)
        patch.setenv(COMPARE_SWITCH, "1")
        yield


_NEEDED = re.compile(r"(openmpi-(bin|common)|libopenmpi|libpmix|libprrte|libevent-(core|pthreads)|libhwloc\d|libmunge)")
"""What a process needs of all that openmpi-bin depends on. Networks' libraries are not among it."""


@dataclass(frozen=True)
class Mpi:
    """A launcher, and what is in the environment of what it starts."""

    launcher: str
    environment: Mapping[str, str]


def mpi() -> Mpi:
    """The MPI of this machine. Skips the test if there is none."""
    found = _found()
    if isinstance(found, str):
        pytest.skip(f"no MPI: {found}")
    return found


@cache
def _found() -> Mpi | str:
    """MPI, or why there is none."""
    launcher = shutil.which("mpirun")
    if launcher is not None:
        return Mpi(launcher, {})
    if sys.platform != "linux" or not all(map(shutil.which, ("apt-get", "apt-cache", "dpkg"))):
        return "there is no mpirun, and no apt-get that could bring it"
    try:
        return _unpacked(_folder())
    except (OSError, subprocess.SubprocessError, StopIteration) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"there is no mpirun, and Debian's packages cannot be had: {' '.join(str(said).split())}"


def _folder() -> Path:
    """Where the packages lie unpacked. They are fetched if they are not there."""
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cortexmlx-tests"
    folder = cached / "openmpi"
    if folder.is_dir():
        return folder
    cached.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached) as name:
        made = Path(name)
        options = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
        told = _run(["apt-cache", "depends", "--recurse", *(f"--no-{o}" for o in options), "openmpi-bin"], made)
        packages = sorted({line for line in told.split("\n") if _NEEDED.match(line)})
        _run(["apt-get", "download", *packages], made)
        for package in made.glob("*.deb"):
            _run(["dpkg", "-x", str(package), "unpacked"], made)
        if not folder.is_dir():  # another run of the tests may have been faster
            (made / "unpacked").rename(folder)
    return folder


def _run(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=PATIENCE)
    return done.stdout


def _unpacked(root: Path) -> Mpi:
    """MPI in a folder. It looks for its parts where it was to be installed, unless it is told."""
    library = next(iter(sorted(root.rglob("libmpi.so.*"))))
    parts = next(iter(root.rglob("mca_btl_vader.so"))).parent
    usr, libraries = root / "usr", library.parent
    return Mpi(
        str(next(iter(root.rglob("orterun")))),
        {
            "MLX_MPI_LIBNAME": str(library),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH")])),
            "OPAL_PREFIX": str(usr),
            "OPAL_LIBDIR": str(libraries),
            "OPAL_PKGLIBDIR": str(parts),
            "OPAL_DATADIR": str(usr / "share"),
            "OPAL_PKGDATADIR": str(usr / "share" / "openmpi"),
            "PMIX_MCA_pcompress_base_silence_warning": "1",
        },
    )
