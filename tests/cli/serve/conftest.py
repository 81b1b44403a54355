"""`cortexmlx serve` as a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., tuple[Any, str, str]]]:
    """Start the command with some arguments; returns the process, the address, and what was said so far."""
    processes = []

    def start(*arguments: object, **environment: str) -> tuple[Any, str, str]:
        command = [sys.executable, "-m", "cortexmlx", "serve", *map(str, arguments), "--port", "0"]
        variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment}
        command += ["--kv-memory", "8MB"]
        process: Any = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables)
        processes.append(process)
        said = ""
        for line in process.stderr:
            said += line
            if "curl" in line:
                break
        found = re.search(r"http://\S+?(?=/v1)", said)
        assert found is not None, said
        return process, found[0], said

    yield start
    for process in processes:
        process.kill()
        process.wait()
