"""Commands on fake engines, in processes of their own that begin at once.

A Python that imports the command line takes most of a second of a CPU, and a chat's test a tenth of that. So one
process (`python fork_server.py`) imports it all and has a single thread. For each command it forks a child, which gets
its own streams, folder, environment and terminal, and then is what `cli_fakes.py COMMAND` would have become.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import termios
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

MOST = 1 << 20
"""Bytes of a request: arguments and an environment."""


class ForkedCommand:
    """A command in a terminal: `pid`, and the exit code once it has ended."""

    def __init__(
        self, arguments: Sequence[str], terminal: int, environment: Mapping[str, str], folder: Path | None
    ) -> None:
        """`terminal` becomes the controlling terminal, and all three streams."""
        self._report, there = os.pipe()
        request = {"arguments": [*arguments], "environment": dict(environment), "folder": str(folder or Path.cwd())}
        socket.send_fds(_server(os.getpid()), [json.dumps(request).encode()], [terminal, there])
        os.close(there)
        self._code: int | None = None
        self.pid = self._number()

    def exit_code(self) -> int:
        """Wait for the end: the exit code, or minus the number of the signal."""
        if self._code is None:
            self._code = self._number()
            os.close(self._report)
        return self._code

    def _number(self) -> int:
        line = b""
        while not line.endswith(b"\n"):
            more = os.read(self._report, 1)
            assert more, "the server of commands has ended"
            line += more
        return int(line)


@cache
def _server(owner: int) -> socket.socket:
    """The connection to the server of this process, which is started at the first call."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, __file__, str(its.fileno())],
        pass_fds=[its.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    its.close()

    def end() -> None:
        mine.close()
        process.wait()

    if owner == os.getpid():
        atexit.register(end)
    return mine


def serve(requests: socket.socket) -> None:
    """Fork a child for each request until the other side closes."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from cortexmlx.cli import app  # noqa: F401  (imported before there are children)
    from cortexmlx.cli.chat import command, talk  # noqa: F401
    from support.cli import cli_fakes

    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MOST, 2)
        if not message:
            break
        terminal, report = descriptors
        if os.fork() == 0:
            requests.close()
            _attend(json.loads(message), terminal, report, cli_fakes.main)
        os.close(terminal)
        os.close(report)
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _attend(request: dict[str, Any], terminal: int, report: int, main: Any) -> None:
    """Start the command, and report its process and how it ends. Never returns."""
    child = os.fork()
    if child == 0:
        os.close(report)
        _become(request, terminal, main)
    os.close(terminal)
    os.write(report, b"%d\n" % child)
    os.write(report, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)


def _become(request: dict[str, Any], terminal: int, main: Any) -> None:
    """Be the command. Never returns."""
    code = 1
    try:
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        for stream in range(3):
            os.dup2(terminal, stream)
        os.close(terminal)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = [sys.argv[0], *request["arguments"]]
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as there:
        serve(there)
