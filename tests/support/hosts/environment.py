"""MPI where an engine's workers find it: on the PATH and in the environment of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cortexmlx.distributed.group import COMPARE_SWITCH
from support.hosts.mpi import mpi

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
