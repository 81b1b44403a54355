"""WorkerProcesses: the workers of one epoch, as MLX's launcher runs them. Without mlx."""

from __future__ import annotations

import ctypes.util
import ipaddress
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cortexmlx.distributed.launch import mlx_launch, supervisor
from cortexmlx.distributed.launch.assignment import CONTROLLER_LOST, KEY_VARIABLE, TEMPORARY_FOLDER
from cortexmlx.distributed.spec import THIS_MACHINE, Host, Hosts
from cortexmlx.errors import HostRefused

_LINES = 60
_LINES_LOOKED_AT = 1000
"""Of what comes at once. Most of it may be MLX's complaints about a lost neighbour."""
_LINE_CHARACTERS = 400

_ENDED = (
    re.compile(r"Node with rank (?P<rank>\d+) exited with code (?P<code>-?\d+)"),  # mlx.launch
    re.compile(r"Node with rank (?P<rank>\d+) completed"),  # mlx.launch, of exit code 0
    re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node .* exited on (?P<signal>signal \d+)"),  # mpirun
    re.compile(r"Process name: \[\[\d+,\d+\],(?P<rank>\d+)\]\nExit code: +(?P<code>-?\d+)"),  # mpirun
)
_LAUNCHERS = re.compile(r"^\[(WARN|INFO)\]|Node with rank \d+ (exited with code|was killed|completed)")
_RING = re.compile(r"^(\[ring\] *)+($|Socket|Sending|Receiving|Too many)")
"""What MLX's ring writes a dozen times on a rank whose neighbour has ended: never the cause."""
_THREAD_FAILED = re.compile(r"^Exception in thread .*\(_thread_fn\)")
"""How the traceback of a thread of `mlx.launch` begins. Each of them runs one rank."""

_NEWS_SECONDS = 1.5
_SSH_FAILED = "255"
_LAUNCHER_EXIT_CODES = (str(-signal.SIGTERM), _SSH_FAILED)
"""The exit codes of ranks, and of their ssh, that `mlx.launch` ends once another has ended, or all if it is ended."""


class WorkerProcesses:
    """The processes of one epoch on this machine: the launcher, its supervisor and the workers here. They have their
    own session, so that Ctrl-C in the terminal reaches the controller alone.
    """

    def __init__(self, hosts: Hosts, variables: Sequence[str], key: bytes, worker: Sequence[str]) -> None:
        """Start `worker`, a command line, for every rank. It finds `variables` (`NAME=VALUE`) in its environment, and
        the key where `read_key` looks for it. Raises HostRefused.
        """
        if not sys.executable:
            raise HostRefused("there is no Python program to start workers with: sys.executable is not set")
        self._hosts = hosts
        self._key = key.hex()
        temp_folder = tempfile.gettempdir()
        # Open MPI makes sockets in it, whose paths must be short. The scripts of `mlx.launch` do not quote its path.
        is_safe_path = hosts.backend != "mpi" and shlex.quote(temp_folder) == temp_folder
        self._folder = Path(tempfile.mkdtemp(prefix="cortexmlx-hosts-", dir=temp_folder if is_safe_path else "/tmp"))
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._ring_lines: deque[str] = deque(maxlen=_LINES)
        self._tracebacks = 0
        """How many tracebacks of the launcher's threads have begun in the output and are not over."""
        self.launcher_failure: str | None = None
        """The exception that ended a thread of the launcher before any rank was told to have ended; None: none did."""
        self._exit_deadline = 0.0
        try:
            command = launch_command(hosts, self._folder, variables, worker)
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, str(self._folder), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._launcher_environment(hosts),
            )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        assert self._supervisor.stdin is not None and self._supervisor.stdout is not None
        self._reader = threading.Thread(target=self._read_output, args=(self._supervisor.stdout,), daemon=True)
        self._reader.start()
        threading.Thread(target=self._kill_orphans, daemon=True).start()
        with suppress(OSError):  # it ended already: `has_ended` says so
            os.write(self._supervisor.stdin.fileno(), f"{self._key}\n".encode())

    def _launcher_environment(self, hosts: Hosts) -> dict[str, str]:
        kept = {TEMPORARY_FOLDER: os.environ.get("TMPDIR", "")}
        changes = {"TMPDIR": str(self._folder), **kept, **core_limits(hosts, os.environ, usable_cores())}
        if hosts.backend == "mpi":
            changes[KEY_VARIABLE] = self._key
        return os.environ | changes

    @property
    def has_ended(self) -> bool:
        """Whether the supervisor, and with it all processes, have ended."""
        return self._supervisor.poll() is not None

    @property
    def last_lines(self) -> list[str]:
        """The last lines that the workers wrote, or the launcher's own if there are no others. Lines of MLX's ring are
        left out unless the workers wrote nothing else.
        """
        lines = list(self._lines)
        worker_lines, inside = [], False
        for line in lines:
            if re.fullmatch("-{20,}", line):  # mpirun's own messages stand between two such lines
                inside = not inside
            elif not inside and not _LAUNCHERS.search(line):
                worker_lines.append(line)
        launchers = [] if any(self._reported_exits()) else [line for line in lines if not line.startswith("---")]
        return worker_lines or list(self._ring_lines) or launchers

    def failed_ranks(self) -> dict[int, str]:
        """Return, for each rank that failed by itself, how it ended, as far as the launcher has reported."""
        failures: dict[int, str] = {}
        for index, exit_report in enumerate(self._reported_exits()):
            rank, code = int(exit_report["rank"]), exit_report.get("code")
            is_later = index > 0 or self.launcher_failure is not None or self.launcher_signal is not None
            if code != str(CONTROLLER_LOST) and not (is_later and code in _LAUNCHER_EXIT_CODES):
                failures.setdefault(
                    rank, exit_report.get("signal") or f"exit code {code or 0}{self._ssh_hint(rank, code)}"
                )
        return failures

    def orphaned_ranks(self) -> set[int]:
        """Return the ranks that ended because they lost the controller, as far as the launcher has reported."""
        return {
            int(exit_report["rank"])
            for exit_report in self._reported_exits()
            if exit_report.get("code") == str(CONTROLLER_LOST)
        }

    @property
    def launcher_signal(self) -> int | None:
        """The signal that ended the launcher or its supervisor; None if none did, as far as is known."""
        code = self._supervisor.poll() or 0
        number = -code if code < 0 else code - 128
        return number if 0 < number < signal.NSIG else None

    def _reported_exits(self) -> Iterator[dict[str, str]]:
        """Return the exits of ranks that the launcher has reported, in its order: `rank`, and `code` or `signal`."""
        text = "\n".join(list(self._lines))
        matches = sorted((m for pattern in _ENDED for m in pattern.finditer(text)), key=re.Match.start)
        return (match.groupdict() for match in matches)

    def _ssh_hint(self, rank: int, code: str | None) -> str:
        """Return what to do if a rank's exit code means that ssh failed; empty otherwise."""
        if code != _SSH_FAILED or rank >= self._hosts.ranks or self._hosts.hosts[rank].is_local:
            return ""
        return f": ssh failed. `ssh {self._hosts.hosts[rank].ssh} true` must work without a question"

    def close(self) -> None:
        """End all processes, and remove their temporary files. Waits for a few seconds at most. Safe to call again."""
        process = self._supervisor
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(supervisor.LONGEST_SECONDS + 2)
        except subprocess.TimeoutExpired:
            process.kill()
            self._kill_orphans()
        self._reader.join(1)
        shutil.rmtree(self._folder, ignore_errors=True)

    def await_launcher_exit(self) -> None:
        """Wait a moment, the first time only, for the launcher to end, as it does after a rank has ended. Its last
        output says how the rank ended, and what the rank wrote comes after that.
        """
        deadline = self._exit_deadline = self._exit_deadline or time.monotonic() + _NEWS_SECONDS
        while not self.has_ended and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.has_ended:
            self._reader.join(_NEWS_SECONDS)

    def _kill_orphans(self) -> None:
        """Wait for the supervisor to end. If it was killed, kill the processes that it can no longer end."""
        if self._supervisor.wait() < 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._supervisor.pid, signal.SIGKILL)

    def _read_output(self, output: IO[bytes]) -> None:
        """Read the output to its end and keep the last lines, shortened and without control characters."""
        rest = b""
        with output:
            while data := os.read(output.fileno(), 65536):
                *complete_lines, rest = (rest + data).split(b"\n")
                rest = rest[-4 * _LINE_CHARACTERS :]
                for line in complete_lines[-_LINES_LOOKED_AT:]:
                    self._keep_line(line)
        self._keep_line(rest)

    def _keep_line(self, line: bytes) -> None:
        """Keep a line of output. Those of MLX's ring are kept apart, and the launcher's tracebacks are dropped."""
        text = line[-4 * _LINE_CHARACTERS :].decode(errors="replace").replace(self._key, "...")
        text = re.sub(r"\x1b\[[0-9;]*m", "", text)
        text = "".join(c if c.isprintable() else " " for c in text)
        is_indented, text = text.startswith(" "), text.strip()[-_LINE_CHARACTERS:]
        if _THREAD_FAILED.match(text):
            self._tracebacks += 1
        elif _RING.match(text):
            self._ring_lines.append(text)
        elif text and (not self._tracebacks or _LAUNCHERS.search(text)):
            self._lines.append(text)
        elif text and not is_indented and not text.startswith("Traceback "):
            self._tracebacks -= 1  # the exception itself is the last line of its traceback
            if self.launcher_failure is None and not any(self._reported_exits()):
                self.launcher_failure = text


# The command lines of the launchers: `mlx.launch` for MLX's ring and JACCL, `mpirun` for MPI. Without mlx: only the
# launcher's own process imports it.


_PORTS = range(20_000, 32_000)
"""Below the ports that systems give to outgoing connections."""

_TRIES = 100


def launch_command(hosts: Hosts, folder: Path, variables: Sequence[str], worker: Sequence[str]) -> list[str]:
    """Return the command that starts `worker` on every rank, with `NAME=VALUE` variables. The host file is written to
    the private `folder`. Raises HostRefused.
    """
    return (_mpirun_command if hosts.backend == "mpi" else _mlx_launch_command)(
        hosts, folder / "hosts", variables, worker
    )


def _mlx_launch_command(hosts: Hosts, file: Path, variables: Sequence[str], worker: Sequence[str]) -> list[str]:
    """Return the command line of `mlx.launch`, and write its host file."""
    entries = [{"ssh": h.ssh, "ips": h.ips, "rdma": h.rdma} for h in hosts.hosts]
    file.write_text(json.dumps({"backend": hosts.backend, "envs": hosts.environment, "hosts": entries}))
    command = [sys.executable, "-P", mlx_launch.__file__, "--hostfile", str(file), "--backend", hosts.backend]
    command += ["--starting-port", str(_find_free_ports(sum(max(1, len(h.ips)) for h in hosts.hosts)))]
    for variable in variables:
        command += ["--env", variable]
    return [*command, "--", *worker]


def _mpirun_command(hosts: Hosts, file: Path, variables: Sequence[str], worker: Sequence[str]) -> list[str]:
    """Return the command line of Open MPI's own launcher: `mlx.launch` writes options that only Open MPI 5 has."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise HostRefused("the backend mpi needs mpirun, which is not on the PATH: install Open MPI, or use the ring")
    slots = Counter(host.ssh for host in hosts.hosts)
    file.write_text("".join(f"{ssh} slots={count}\n" for ssh, count in slots.items()))
    command = [mpirun, "--hostfile", str(file), "-np", str(hosts.ranks), "--map-by", "slot", "--bind-to", "none"]
    for variable in (*_mpi_library_variable(Path(mpirun)), *hosts.environment, *variables, KEY_VARIABLE):
        command += ["-x", variable]
    return [*command, *worker]


def _mpi_library_variable(mpirun: Path) -> list[str]:
    """Return the variable that names Open MPI's library for MLX, which looks for another name on some systems."""
    if "MLX_MPI_LIBNAME" in os.environ:
        return ["MLX_MPI_LIBNAME"]
    libraries = sorted((mpirun.resolve().parent.parent / "lib").glob("libmpi.[ds]*"))
    name = str(libraries[0]) if libraries else ctypes.util.find_library("mpi")
    return [f"MLX_MPI_LIBNAME={name}"] if name else []


def core_limits(hosts: Hosts, environment: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return environment variables by which this machine's workers share its cores, except those that the user set."""
    local_ranks = sum(host.is_local for host in hosts.hosts)
    if local_ranks < 2:
        return {}
    variables = {}
    if not {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"} & set(environment):
        variables["OPENBLAS_NUM_THREADS"] = str(max(1, cores // local_ranks))
    if hosts.backend == "mpi" and local_ranks >= cores:
        variables["OMPI_MCA_mpi_yield_when_idle"] = "1"  # else a rank that waits keeps a core from those that compute
    return {name: value for name, value in variables.items() if name not in environment}


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _find_free_ports(count: int) -> int:
    """Return the first of `count` consecutive ports that are free on this machine. Others may take them meanwhile, and
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


# Where the controller listens for its workers, and which addresses they may come from.


_SSH_SECONDS = 10


@dataclass(frozen=True)
class GroupAddresses:
    """This machine's addresses that workers connect to (`controller`), and where workers may come from (`workers`)."""

    controller: tuple[str, ...]
    workers: tuple[str, ...]


def find_addresses(hosts: Hosts) -> GroupAddresses:
    """Find the addresses between this machine and each host of a group. Raises HostRefused if one has no route."""
    controller_addresses: dict[str, None] = {}
    worker_addresses: dict[str, None] = {}
    for host in dict.fromkeys(hosts.hosts):
        host_addresses = [THIS_MACHINE] if host.is_local else _host_addresses(host)
        local_addresses = (
            [THIS_MACHINE]
            if host.is_local
            else [address for each in host_addresses if (address := _local_address_for(each))]
        )
        if not local_addresses:
            raise HostRefused(
                f"{host.ssh} has no address that this machine can reach: "
                f"check its name (`ssh {host.ssh}` must work) and the network"
            )
        controller_addresses |= dict.fromkeys(local_addresses)
        worker_addresses |= dict.fromkeys(host_addresses)
        if not host.is_local:
            worker_addresses |= dict.fromkeys(local_addresses)  # the host may be this machine under its own name
    return GroupAddresses(tuple(controller_addresses), tuple(worker_addresses))


def _host_addresses(host: Host) -> list[str]:
    """Return the addresses of a host: those of the host file, and those of the name that ssh connects to."""
    addresses = dict.fromkeys(host.ips)
    try:
        address_infos = socket.getaddrinfo(_resolve_ssh_alias(host.ssh), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        address_infos = []
    return list(
        addresses | dict.fromkeys(str(info[4][0]) for info in address_infos if _is_usable_address(str(info[4][0])))
    )


def _is_usable_address(address: str) -> bool:
    """Return whether one can connect to an address without naming a network interface."""
    return "%" not in address and not ipaddress.ip_address(address).is_link_local


def _resolve_ssh_alias(ssh: str) -> str:
    """Return the host name that `ssh` connects to for a name, which may be an alias of the user's configuration."""
    host_name = ssh.rpartition("@")[2]
    if shutil.which("ssh") is None:
        return host_name
    try:
        result = subprocess.run(["ssh", "-G", ssh], capture_output=True, text=True, timeout=_SSH_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return host_name
    host_names = [line.split(maxsplit=1)[1] for line in result.stdout.splitlines() if line.startswith("hostname ")]
    return host_names[0] if host_names else host_name


def _local_address_for(address: str) -> str | None:
    """Return this machine's own address on the route to another address; None without a route. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
