"""Groups of processes, each of which runs a part of a model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.hosts.mpi import mpi
from support.hosts.parts.script import Script
from support.patience import PATIENCE


def job(model: Path, script: Script, cut: str = "auto") -> dict[str, Any]:
    """A model, how it is cut, and what is asked of it."""
    return {"model": str(model), "cut": cut, "script": script.plain()}


def by_mpi(processes: int, jobs: Sequence[dict[str, Any]], folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank came to, by rank, for each job. Skips the test where there is no MPI."""
    found = mpi()
    command = found.command(processes, _program("mpi", jobs, folder))
    _wait_for([subprocess.Popen(command, env=_environment(dict(found.environment)), **_PIPES)])
    return _results(processes, folder)


def by_ring(processes: int, jobs: Sequence[dict[str, Any]], folder: Path) -> list[list[dict[str, Any]]]:
    """The same by MLX's ring."""
    command = _program("ring", jobs, folder)
    hosts = folder / "ring.json"
    with ExitStack() as taken:
        sockets = [taken.enter_context(socket.socket()) for _ in range(processes)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        hosts.write_text(json.dumps([[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]))
    own = [{"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)} for rank in range(processes)]
    _wait_for([subprocess.Popen(command, env=_environment(each), **_PIPES) for each in own])
    return _results(processes, folder)


_PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def _program(backend: str, jobs: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(list(jobs)))
    return [sys.executable, "-m", "support.hosts.parts.rank_program", backend, str(folder / "jobs.json"), str(folder)]


def _environment(own: dict[str, str]) -> dict[str, str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"} | own


def _wait_for(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Wait until all have ended well. If one does not, all are killed: the others would wait for it for ever."""
    try:
        for process in processes:
            said, _ = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _results(processes: int, folder: Path) -> list[list[dict[str, Any]]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
