"""What a program finds in `cortexmlx`: at run time, and by its type checker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cortexmlx


@pytest.mark.parametrize("name", cortexmlx.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(cortexmlx, name) is not None


def test_importing_the_package_imports_neither_mlx_nor_numpy() -> None:
    program = "import sys, cortexmlx; print(sorted({'mlx', 'mlx_lm', 'numpy', 'transformers'} & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_type_checker_refuses_a_name_that_does_not_exist(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    client = tmp_path / "client.py"
    client.write_text(
        "from cortexmlx import Engine, PromptTooLong, RequestHandle\nfrom cortexmlx import PromptToLong\n"
    )
    package = tmp_path / "cortexmlx" / "__init__.py"
    package.parent.mkdir()
    package.write_text(Path(cortexmlx.__file__).read_text())
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "skip", "--ignore-missing-imports"]
    done = subprocess.run([*command, str(package), str(client)], cwd=tmp_path, capture_output=True, text=True)
    refused = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(refused) == 1 and "client.py:2" in refused[0] and "PromptToLong" in refused[0], done.stdout
