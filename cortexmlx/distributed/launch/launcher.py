"""The command lines of the launchers: `mlx.launch` for MLX's ring and JACCL, `mpirun` for MPI. Without mlx: only
the launcher's own process imports it.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import random
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from cortexmlx.distributed.launch import mlx_launch
from cortexmlx.distributed.launch.assignment import KEY_VARIABLE
from cortexmlx.distributed.spec import Hosts
from cortexmlx.errors import HostRefused

_PORTS = range(20_000, 32_000)
"""Below the ports that systems give to outgoing connections."""

_TRIES = 100


def launch_command(hosts: Hosts, folder: Path, variables: Sequence[str], worker: Sequence[str]) -> list[str]:
    """Return the command that starts `worker` for every rank, with `NAME=VALUE` variables. `folder` is a private one;
    the host file is written there. Raises HostRefused.
    """
    return (_mpirun if hosts.backend == "mpi" else _mlx_launch)(hosts, folder / "hosts", variables, worker)


def _mlx_launch(hosts: Hosts, file: Path, variables: Sequence[str], worker: Sequence[str]) -> list[str]:
    entries = [{"ssh": h.ssh, "ips": h.ips, "rdma": h.rdma} for h in hosts.hosts]
    file.write_text(json.dumps({"backend": hosts.backend, "envs": hosts.environment, "hosts": entries}))
    command = [sys.executable, "-P", mlx_launch.__file__, "--hostfile", str(file), "--backend", hosts.backend]
    command += ["--starting-port", str(_free_ports(sum(max(1, len(h.ips)) for h in hosts.hosts)))]
    for variable in variables:
        command += ["--env", variable]
    return [*command, "--", *worker]


def _mpirun(hosts: Hosts, file: Path, variables: Sequence[str], worker: Sequence[str]) -> list[str]:
    """`mlx.launch` writes options that Open MPI has from its version 5 only, so MPI's own launcher is called."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise HostRefused("the backend mpi needs mpirun, which is not on the PATH: install Open MPI, or use the ring")
    slots = Counter(host.ssh for host in hosts.hosts)
    file.write_text("".join(f"{ssh} slots={count}\n" for ssh, count in slots.items()))
    command = [mpirun, "--hostfile", str(file), "-np", str(hosts.ranks), "--map-by", "slot", "--bind-to", "none"]
    for variable in (*_mpi_library(Path(mpirun)), *hosts.environment, *variables, KEY_VARIABLE):
        command += ["-x", variable]
    return [*command, *worker]


def _mpi_library(mpirun: Path) -> list[str]:
    """Name the library of Open MPI for MLX, which looks for another name on some systems."""
    if "MLX_MPI_LIBNAME" in os.environ:
        return ["MLX_MPI_LIBNAME"]
    found = sorted((mpirun.resolve().parent.parent / "lib").glob("libmpi.[ds]*"))
    name = str(found[0]) if found else ctypes.util.find_library("mpi")
    return [f"MLX_MPI_LIBNAME={name}"] if name else []


def shared_cores(hosts: Hosts, environment: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return the variables that let the workers of this machine share its cores, except those that the user set."""
    here = sum(host.here for host in hosts.hosts)
    if here < 2:
        return {}
    wanted = {}
    if not {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"} & set(environment):
        wanted["OPENBLAS_NUM_THREADS"] = str(max(1, cores // here))
    if hosts.backend == "mpi" and here >= cores:
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"  # else a rank that waits keeps a core from those that compute
    return {name: value for name, value in wanted.items() if name not in environment}


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_ports(count: int) -> int:
    """Return the first of `count` ports in a row that are free on this machine. Others may take them meanwhile, and
    other hosts are not asked: the start then fails, and the next one tries other ports.
    """
    for first in random.sample(_PORTS[:-count], _TRIES):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first
    raise HostRefused(f"no {count} ports in a row are free between {_PORTS.start} and {_PORTS.stop}")
