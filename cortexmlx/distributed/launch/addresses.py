"""Where the controller listens for its workers, and which addresses they may come from. Without mlx."""

from __future__ import annotations

import ipaddress
import shutil
import socket
import subprocess
from dataclasses import dataclass

from cortexmlx.distributed.spec import THIS_MACHINE, Host, Hosts
from cortexmlx.errors import HostRefused

_SSH_SECONDS = 10


@dataclass(frozen=True)
class Addresses:
    """`own`: the addresses of this machine that the workers connect to. `workers`: where workers may come from."""

    own: tuple[str, ...]
    workers: tuple[str, ...]


def addresses(hosts: Hosts) -> Addresses:
    """Return the addresses of a group. Raises HostRefused if this machine has no way to one of the hosts."""
    own: dict[str, None] = {}
    workers: dict[str, None] = {}
    for host in dict.fromkeys(hosts.hosts):
        theirs = [THIS_MACHINE] if host.here else _of(host)
        ours = [THIS_MACHINE] if host.here else [address for each in theirs if (address := _towards(each))]
        if not ours:
            raise HostRefused(
                f"{host.ssh} has no address that this machine can reach: "
                f"check its name (`ssh {host.ssh}` must work) and the network"
            )
        own |= dict.fromkeys(ours)
        workers |= dict.fromkeys(theirs)
        if not host.here:
            workers |= dict.fromkeys(ours)  # the host may be this machine under its own name
    return Addresses(tuple(own), tuple(workers))


def _of(host: Host) -> list[str]:
    """The addresses of a host: those of the host file, and those of the name that ssh connects to."""
    found = dict.fromkeys(host.ips)
    try:
        told = socket.getaddrinfo(_name(host.ssh), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        told = []
    return list(found | dict.fromkeys(str(info[4][0]) for info in told if _usable(str(info[4][0]))))


def _usable(address: str) -> bool:
    """Whether an address says where to connect without naming an interface."""
    return "%" not in address and not ipaddress.ip_address(address).is_link_local


def _name(ssh: str) -> str:
    """The host that `ssh` connects to for a name, which may be an alias of the user's configuration."""
    plain = ssh.rpartition("@")[2]
    if shutil.which("ssh") is None:
        return plain
    try:
        asked = subprocess.run(["ssh", "-G", ssh], capture_output=True, text=True, timeout=_SSH_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return plain
    said = [line.split(maxsplit=1)[1] for line in asked.stdout.splitlines() if line.startswith("hostname ")]
    return said[0] if said else plain


def _towards(address: str) -> str | None:
    """This machine's own address on the way to another; None without a way. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
