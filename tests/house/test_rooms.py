"""The shape of the house: who may import whom, and who never sees mlx."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cortexmlx.host.developer_parts import DEVELOPER_PARTS

ROOT = Path(__file__).resolve().parents[2]
ORDER = (
    "arrays",
    "errors",
    "structured",
    "tools",
    "calls",
    "logprobs",
    "embedding",
    "machine",
    "progress",
    "sampling_params",
    "request",
    "messages",
    "protocols",
    "stats",
    "host",
    "timed_choice",
    "cpu",
    "kv",
    "store",
    "metal",
    "models",
    "grammar",
    "scheduling",
    "speculation",
    "attention",
    "products",
    "execution",
    "hosts",
    "serving",
    "sessions",
    "perplexity",
    "engine",
    "server",
    "bench",
    "cli",
    "bench.studies",
)
"""The rooms from the ground up: each imports itself and what stands before it, also inside functions. The studies
measure everything, and nobody imports them.
"""

FOLDERS = {"cortexmlx": ROOT / "cortexmlx", **{name: ROOT / name for name in ("metal", "bench", "cli")}}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package under its import name."""
    for name, folder in FOLDERS.items():
        top = ("cortexmlx",) if name == "cortexmlx" else ("cortexmlx", name)
        for path in sorted(folder.rglob("*.py")):
            parts = (*top, *path.relative_to(folder).with_suffix("").parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(modules())


def imports(module: str) -> Iterator[tuple[int, str]]:
    """The modules of the package that a module names in its imports, with the line."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                yield node.lineno, whole if whole in MODULES else source


def room(module: str) -> str | None:
    """The room that a module stands in; what the package itself offers comes with the engine."""
    if module.partition(".")[0] != "cortexmlx":
        return None
    if module.startswith("cortexmlx.bench.studies"):
        return "bench.studies"
    return module.split(".")[1] if "." in module else "engine"


def test_every_room_has_a_place_in_the_order() -> None:
    rooms = {room(module) for module in MODULES if module not in ("cortexmlx", "cortexmlx.__main__")}
    assert rooms == set(ORDER)


def test_imports_go_down() -> None:
    upward = []
    for module, path in MODULES.items():
        mine = "cli" if module == "cortexmlx.__main__" else room(module)
        assert mine is not None
        for line, imported in imports(module):
            theirs = room(imported)
            if theirs is not None and module != "cortexmlx" and ORDER.index(theirs) > ORDER.index(mine):
                upward.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
    assert not upward


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    graph = {m: {i for _, i in imports(m) if i in MODULES and i not in (m, "cortexmlx")} for m in MODULES}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"a circle: {' -> '.join((*way[way.index(module) :], module))}"
        if module not in done:
            for other in graph[module]:
                visit(other, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_commands_do_not_import_each_other() -> None:
    """What two of them need stands beside them in `cli/`; only the list of all commands knows them."""
    commands = {"batch", "bench", "cache", "chat", "doctor", "embed", "eval", "generate", "models", "plan"}
    named = {module: module.split(".")[2] for module in MODULES if module.startswith("cortexmlx.cli.")}
    assert commands < set(named.values())
    crossing = []
    for module, mine in named.items():
        theirs = {named[i] for _, i in imports(module) if i in named}
        crossing += [f"{module} imports {other}" for other in theirs & commands - {mine} if mine != "app"]
    assert not crossing


def for_developers(module: str) -> bool:
    return any(module == part or module.startswith(f"{part}.") for part in DEVELOPER_PARTS)


def test_a_wheel_has_every_folder_but_the_developers_parts() -> None:
    """The packages of a wheel are listed by name. An editable install finds the others, too."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {module if path.name == "__init__.py" else module.rpartition(".")[0] for module, path in MODULES.items()}
    assert set(setuptools["packages"]) == {package for package in packages if not for_developers(package)}
    assert [p for p in (*setuptools["package-dir"], *setuptools["package-data"]) if for_developers(p)] == []
    assert [part for part in DEVELOPER_PARTS if part not in packages] == []


def test_what_a_wheel_has_imports_no_developers_part() -> None:
    shipped = [module for module in MODULES if not for_developers(module)]
    assert [f"{m}:{line} imports {i}" for m in shipped for line, i in imports(m) if for_developers(i)] == []


@pytest.mark.parametrize("folder", ["protocols", "scheduling", "speculation"])
def test_what_decides_and_what_others_formats_are_read_by_never_see_mlx(folder: str) -> None:
    """Every module of the folder can be imported where there is no mlx at all, nor what the command line draws with."""
    names = [m for m in MODULES if m.startswith(f"cortexmlx.{folder}.")]
    assert len(names) > 2
    absent = ("mlx", "mlx.core", "typer", "rich", "prompt_toolkit")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n" + "".join(f"import {n}\n" for n in names)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
