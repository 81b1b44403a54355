"""What a program finds in `cortexmlx`: at run time, and by its type checker."""

from __future__ import annotations

import ast
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cortexmlx
from cortexmlx import errors, stats
from support.engine import client

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ast.parse(Path(client.__file__).read_text())
CLASSES = [value for value in map(cortexmlx.__getattr__, sorted(cortexmlx._HOMES)) if isinstance(value, type)]


def test_every_public_name_is_there_and_errors_and_statistics_are_so_twice() -> None:
    assert None not in {getattr(cortexmlx, name) for name in cortexmlx.__all__}
    for module in (errors, stats):
        assert all(getattr(cortexmlx, name) is getattr(module, name) for name in module.__all__)
        classes = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        assert {name for name in classes if name[0].isupper()} == set(module.__all__)


def test_importing_the_package_imports_neither_mlx_nor_numpy() -> None:
    program = "import sys, cortexmlx; print(sorted({'mlx', 'mlx_lm', 'numpy', 'transformers'} & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_type_checker_refuses_a_name_that_does_not_exist(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    client = tmp_path / "client.py"
    client.write_text("from cortexmlx import Completion, Engine, RequestHandle\nfrom cortexmlx import Complition\n")
    package = tmp_path / "cortexmlx" / "__init__.py"
    package.parent.mkdir()
    package.write_text(Path(cortexmlx.__file__).read_text())
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "skip", "--ignore-missing-imports"]
    done = subprocess.run([*command, str(package), str(client)], cwd=tmp_path, capture_output=True, text=True)
    refused = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(refused) == 1 and "client.py:2" in refused[0] and "Complition" in refused[0], done.stdout


def test_what_a_program_is_shown_is_what_it_may_use() -> None:
    assert sorted(dir(cortexmlx)) == sorted({*cortexmlx.__all__, "errors", "stats"})
    assert len(set(cortexmlx.__all__)) == len(cortexmlx.__all__)


def test_a_program_that_uses_everything_runs(tiny: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    client.main(tiny("llama"), tmp_path)
    assert capfd.readouterr().out.endswith(f"{cortexmlx.__version__}\n")


def test_that_program_uses_every_name_and_every_method() -> None:
    imported = {a.name for n in ast.walk(CLIENT) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert {*cortexmlx.__all__, *errors.__all__, *stats.__all__} - {"__version__"} <= imported
    used = {n.attr for n in ast.walk(CLIENT) if isinstance(n, ast.Attribute)}
    methods = {f"{c.__name__}.{m}" for c in CLASSES for m in dir(c) if not m.startswith("_")}
    engines = {
        "push",
        "fail",
        "advance",
        "abandon",
        "owner",
        "check_may_wait",
        "set_event_callback",
        "take",
        "wait",
    }  # with a handle
    missing = {m for m in methods if m.partition(".")[2] not in used | engines}
    assert {m for m in missing if not m.startswith(("KVBlockAllocator.", "KVHandle."))} == set()


WRONG = """
from cortexmlx import Engine, SamplingParams
Engine("m", kv_memroy=3)
Engine.open("m", block_size="32")
SamplingParams(stop=5)
engine = Engine("m")
engine.generate(5)
engine.generate("text", timeout="5")
engine.conversation().ask("text", max_tokens="5")
number: int = engine.decode([1])
"""


@pytest.mark.slow
def test_a_type_checker_accepts_what_runs_and_nothing_else(tmp_path: Path) -> None:
    """The program above, strictly; calls that are wrong; and every name there might be, in both ways of asking."""
    pytest.importorskip("mypy")
    tree = tmp_path / "cortexmlx"
    tree.mkdir()
    for source in (ROOT / "cortexmlx").iterdir():
        (tree / source.name).symlink_to(source.resolve())
    modules = [module.name for module in pkgutil.iter_modules(cortexmlx.__path__)]
    names = [*cortexmlx.__all__, *errors.__all__, *stats.__all__, "PromptToLong", "Tokenizer"]
    ways = {
        "names.py": [f"from cortexmlx import {name} as my_{name}" for name in [*names, *modules]],
        "attributes.py": [f"cortexmlx.{name}" for name in names],
    }
    for file, lines in ways.items():
        (tmp_path / file).write_text("\n".join(["import cortexmlx", *lines, ""]))
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "client.py").symlink_to(client.__file__)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    done = subprocess.run(
        [*command, "-m", "names", "-m", "attributes", "-m", "wrong", "-m", "client"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    said = [line.split(":")[:2] for line in done.stdout.splitlines() if "error:" in line]
    assert [int(line) for file, line in said if file == "wrong.py"] == [3, 4, 5, 7, 8, 9, 10], done.stdout
    assert {file for file, _ in said} == {"wrong.py", *ways}, done.stdout
    refused = {ways[file][int(line) - 2] for file, line in said if file in ways}
    assert refused == {line for lines in ways.values() for line in lines if not runs(line)}


def runs(line: str) -> bool:
    program = f"import cortexmlx\n{line}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment).returncode == 0
