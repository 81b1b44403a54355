"""What says that a part is for developers only."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from cortexmlx.attention.backends import choose_backend
from cortexmlx.errors import InvalidRequest
from cortexmlx.system.developer_parts import DEVELOPER_PARTS, import_developer_part

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("module", ["cortexmlx.metal.lab.kernel_files", "cortexmlx.metal.lab.sim"])
def test_a_part_that_is_missing_is_named_with_the_next_step(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidRequest, match=r"^the count needs the kernel simulator.*pip install -e"):
        import_developer_part(module, "the count")


def test_the_simulator_as_a_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cortexmlx.metal.lab.sim", None)
    with pytest.raises(InvalidRequest, match="attention='sim' needs the kernel simulator"):
        choose_backend("sim")


def test_another_module_that_is_missing_is_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A developer whose own install lacks a package is told which."""
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        import_developer_part("needs_more", "a test")


FROM_THE_WHEEL = """
import sys
sys.path[:0] = sys.argv[1:3]  # without site's .pth files, so without the editable install
import cortexmlx
assert cortexmlx.__file__.startswith(sys.argv[1]), cortexmlx.__file__
from cortexmlx import Engine, InvalidRequest
try:
    Engine("smollm2", attention="sim")
except InvalidRequest as error:
    print(error)
from cortexmlx.cli import main
sys.argv[1:] = sys.argv[3:]
main()
"""


@pytest.mark.slow
def test_a_wheel_runs_without_the_developers_parts(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "tests", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(tmp_path / "source")]
    subprocess.run(build, check=True, capture_output=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "wheel")
    assert "cortexmlx/server/index.html" in names
    assert "cortexmlx/metal/shaders/paged_decode.metal" in names and "cortexmlx/bench/session.py" in names
    folders = tuple(f"{part.replace('.', '/')}/" for part in DEVELOPER_PARTS)
    assert [name for name in names if name.startswith(folders)] == []

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        paths = (str(tmp_path / "wheel"), sysconfig.get_path("purelib"))
        command = [sys.executable, "-S", "-c", FROM_THE_WHEEL, *paths, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=600)

    for command in (("doctor",), ("--help",), ("bench", "--help"), ("bench", "-p", "8", "-n", "2", "-r", "1")):
        done = run(*command)
        assert done.returncode == 0, (command, done.stderr)
        assert "attention='sim' needs the kernel simulator" in done.stdout and "Traceback" not in done.stderr
        assert command != ("doctor",) or "simulator     not in this install" in done.stdout
