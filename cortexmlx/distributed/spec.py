"""Which machines, or how many processes on this one, a model is spread over: `--hosts N|FILE`. Without mlx."""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortexmlx.errors import HostRefused

THIS_MACHINE = "127.0.0.1"
"""The name by which MLX's launcher starts a process without ssh."""

BACKENDS = ("ring", "mpi", "jaccl", "jaccl-ring")
"""MLX's ways to move numbers between processes that cortexmlx starts."""

MAX_RANKS = 64

_MAX_BYTES = 1_000_000


@dataclass(frozen=True)
class Host:
    """Where one worker runs: an entry of the host file, or a process on this machine."""

    ssh: str
    """What ssh connects to."""
    ips: tuple[str, ...] = ()
    """The addresses that the workers reach each other by."""
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()
    """JACCL's devices to every other host, None for itself; empty without JACCL."""

    @property
    def is_local(self) -> bool:
        """Whether its worker starts on this machine, without ssh."""
        return self.ssh == THIS_MACHINE


@dataclass(frozen=True)
class Hosts:
    """Where the workers of a group run, by rank, and how they exchange data."""

    hosts: tuple[Host, ...]
    backend: str
    """One of `BACKENDS`."""
    environment: tuple[str, ...] = ()
    """`NAME=VALUE` for every worker, from the host file."""
    file: Path | None = None
    """The host file, if there is one."""

    @classmethod
    def parse(cls, text: str, backend: str | None = None) -> Hosts:
        """Parse `--hosts`: a number of processes on this machine, perhaps with a backend (`2`, `2:mpi`), or the path
        of a host file of MLX (`mlx.distributed_config` writes one). `backend` overrides what those say. The default
        is the ring, as in `mlx.launch`. Raises HostRefused.
        """
        number, _, suffix = text.strip().partition(":")
        if number.isascii() and number.isdigit():
            count = int(number[:9])
            if not 1 <= count <= MAX_RANKS:
                raise HostRefused(f"--hosts {text}: give a number of processes from 1 to {MAX_RANKS}, or a host file")
            local_host = Host(THIS_MACHINE, (THIS_MACHINE,))
            return cls((local_host,) * count, _check_backend(backend or suffix or "ring", f"--hosts {text}"))
        return _read_host_file(Path(text).expanduser(), backend)

    @property
    def ranks(self) -> int:
        """The number of workers."""
        return len(self.hosts)

    @property
    def is_local(self) -> bool:
        """Whether all workers start on this machine."""
        return all(host.is_local for host in self.hosts)

    @property
    def names(self) -> tuple[str, ...]:
        """The host of each rank, as a user would name it."""
        return tuple("this machine" if host.is_local else host.ssh for host in self.hosts)


def _check_backend(name: str, label: str) -> str:
    """Return the name of a backend. Raises HostRefused for an unknown one; `label` says where it stands."""
    if name not in BACKENDS:
        raise HostRefused(f"{label}: the backend {name!r} is none of {', '.join(BACKENDS)}")
    return name


def _read_host_file(path: Path, backend: str | None) -> Hosts:
    """Read a host file: `{"backend", "envs", "hosts": [{"ssh", "ips", "rdma"}]}`, or the list of hosts alone."""
    name = str(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise HostRefused(f"{name} is no host file: it has more than {_MAX_BYTES:,} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HostRefused(
            f"--hosts {name}: no such file. Give a number of processes on this machine, such as 2, or a host file "
            "of MLX: mlx.distributed_config writes one"
        ) from None
    except OSError as error:
        raise HostRefused(f"{name}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise HostRefused(f"{name} is no host file: {error}") from None
    content = {"hosts": data} if isinstance(data, list) else data
    if not isinstance(content, dict) or not isinstance(content.get("hosts"), list):
        raise HostRefused(f'{name} is no host file: it needs a list of hosts, such as [{{"ssh": ..., "ips": [...]}}]')
    if not 1 <= len(content["hosts"]) <= MAX_RANKS:
        raise HostRefused(f"{name} has {len(content['hosts'])} hosts: 1 to {MAX_RANKS} are possible")
    chosen_backend = _check_backend(backend or content.get("backend") or "ring", name)
    hosts = tuple(_parse_host(entry, f"{name}, host {rank}") for rank, entry in enumerate(content["hosts"]))
    _check_hosts(hosts, chosen_backend, name)
    if chosen_backend == "mpi":  # it fills one host after the other
        order = list(dict.fromkeys(host.ssh for host in hosts))
        hosts = tuple(sorted(hosts, key=lambda host: order.index(host.ssh)))
    return Hosts(hosts, chosen_backend, _parse_environment(content.get("envs", []), name), path)


def _parse_host(entry: Any, label: str) -> Host:
    """Parse one entry of a host file; `label` names it in errors. Raises HostRefused."""
    ssh = entry.get("ssh") if isinstance(entry, dict) else None
    if not isinstance(ssh, str) or not ssh or ssh.startswith("-") or not ssh.isprintable() or " " in ssh:
        raise HostRefused(f'{label}: "ssh" must be the name that ssh connects to, not {ssh!r}')
    ips = _check_strings(entry.get("ips", []), f'{label}: "ips"')
    for ip in ips:
        try:
            ipaddress.ip_address(ip)
        except ValueError:
            raise HostRefused(f'{label}: "ips" has {ip!r}, which is no IP address') from None
    rdma = entry.get("rdma", [])
    if not isinstance(rdma, list):
        raise HostRefused(f'{label}: "rdma" must be a list')
    return Host(ssh, ips, tuple(_parse_devices(each, f'{label}: "rdma"') for each in rdma))


def _parse_devices(value: Any, label: str) -> str | tuple[str, ...] | None:
    """Parse the RDMA devices by which a host reaches another one: a name, or several; None for the host itself."""
    return value if value is None or isinstance(value, str) else _check_strings(value, label)


def _check_strings(value: Any, label: str) -> tuple[str, ...]:
    """Return a list of strings as a tuple. Raises HostRefused for anything else."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise HostRefused(f"{label} must be a list of strings")
    return tuple(value)


def _parse_environment(value: Any, label: str) -> tuple[str, ...]:
    """Parse the `NAME=VALUE` list of a host file. Raises HostRefused."""
    variables = _check_strings(value, f'{label}: "envs"')
    for each in variables:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", each, re.DOTALL):
            raise HostRefused(f'{label}: "envs" has {each!r}, which is not NAME=VALUE')
    return variables


def _check_hosts(hosts: tuple[Host, ...], backend: str, name: str) -> None:
    """Raise HostRefused for hosts with which the launcher, or the backend, would fail."""
    if backend == "ring":
        for rank, host in enumerate(hosts):
            if not host.ips:
                raise HostRefused(f'{name}, host {rank}: the ring needs "ips", the addresses of {host.ssh}')
    if not all(host.is_local for host in hosts) and backend != "mpi":
        for rank, host in enumerate(hosts):
            if any(ipaddress.ip_address(ip).is_loopback for ip in host.ips):
                raise HostRefused(f'{name}, host {rank}: the other hosts cannot reach {host.ssh} by "ips" {host.ips}')
    if backend.startswith("jaccl"):
        if not hosts[0].ips:
            raise HostRefused(f'{name}, host 0: JACCL needs "ips", an address that every host reaches')
        for rank, host in enumerate(hosts):
            if len(host.rdma) != len(hosts) or host.rdma[rank] is not None:
                raise HostRefused(
                    f'{name}, host {rank}: "rdma" needs {len(hosts)} entries, one per host, and null for itself: '
                    "mlx.distributed_config writes them"
                )
