"""The shape of the house: who may import whom, and who never sees mlx."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from cortexmlx.system.developer_parts import DEVELOPER_PARTS

ROOT = Path(__file__).resolve().parents[2]
FLOORS = (
    ("errors",),
    ("structured",),
    ("types",),
    ("stats", "cpu", "mlx_lm", "system"),
    ("protocols",),
    ("autotune",),
    ("kv", "disk.tier"),
    ("disk",),
    ("metal",),
    ("models",),
    ("vision",),
    ("scheduling", "disk.loads"),
    ("structured.compiler", "structured.matcher", "structured.sources", "structured.deep_stack"),
    ("attention",),
    ("matmul", "speculation"),
    ("execution",),
    ("disk.connector", "disk.setup"),
    ("core", "distributed"),
    ("perplexity", "sessions"),
    ("engine",),
    ("server",),
    ("bench",),
    ("cli",),
    ("metal.lab",),
    ("bench.studies",),
)
"""From the ground up: a module imports what stands on its own floor and below, also inside functions. A name is that of
a folder of the package, or of a part of it that stands higher than the rest: `disk` is files, and `disk.connector`
moves blocks between them and a runner.
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


@cache
def imports(module: str) -> tuple[tuple[int, str], ...]:
    """The modules of the package that a module names in its imports, with the line."""
    return tuple(read_imports(module))


def read_imports(module: str) -> Iterator[tuple[int, str]]:
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


def floor(module: str) -> int | None:
    """The floor that a module stands on; what the package itself offers comes with the engine."""
    if module.partition(".")[0] != "cortexmlx":
        return None
    name = module.removeprefix("cortexmlx").removeprefix(".") or "engine"
    name = "cli" if name == "__main__" else name
    found = [each for names in FLOORS for each in names if f"{name}.".startswith(f"{each}.")]
    assert found, f"{module} has no place in FLOORS"
    return next(n for n, names in enumerate(FLOORS) if max(found, key=len) in names)


def test_imports_go_down() -> None:
    upward = []
    for module, path in MODULES.items():
        mine = floor(module)
        assert mine is not None
        for line, imported in imports(module):
            theirs = floor(imported)
            if theirs is not None and module != "cortexmlx" and theirs > mine:
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
    commands = {"batch", "bench", "cache", "chat", "doctor", "eval", "generate", "models", "plan"}
    named = {module: module.split(".")[2] for module in MODULES if module.startswith("cortexmlx.cli.")}
    assert commands < set(named.values())
    crossing = []
    for module, mine in named.items():
        theirs = {named[i] for _, i in imports(module) if i in named}
        crossing += [f"{module} imports {other}" for other in theirs & commands - {mine} if mine != "app"]
    assert not crossing


def for_developers(module: str) -> bool:
    return any(module == part or module.startswith(f"{part}.") for part in DEVELOPER_PARTS)


def test_a_wheel_leaves_out_the_developers_parts() -> None:
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert find["exclude"] == [f"{part}*" for part in sorted(DEVELOPER_PARTS, reverse=True)]
    folders = {module if path.name == "__init__.py" else module.rpartition(".")[0] for module, path in MODULES.items()}
    assert [part for part in DEVELOPER_PARTS if part not in folders] == []
    assert [name for name in folders if MODULES[name].name != "__init__.py"] == []


def test_what_a_wheel_has_imports_no_developers_part() -> None:
    shipped = [module for module in MODULES if not for_developers(module)]
    assert [f"{m}:{line} imports {i}" for m in shipped for line, i in imports(m) if for_developers(i)] == []


def test_what_decides_and_what_others_formats_are_read_by_never_see_mlx() -> None:
    """Every module of the folders, and those between a controller and its runners, can be imported where there is no
    mlx, nor what the command line draws with.
    """
    folders = ("cortexmlx.protocols.", "cortexmlx.scheduling.", "cortexmlx.speculation.")
    apart = ("distributed.remote_runner", "distributed.rank_server", "execution.boundary")
    names = [m for m in MODULES if m.startswith(folders)] + [f"cortexmlx.{each}" for each in apart]
    assert len(names) > 6
    absent = ("mlx", "mlx.core", "typer", "rich", "prompt_toolkit")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n" + "".join(f"import {n}\n" for n in names)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wired_limit_is_never_set() -> None:
    """As docs/memory.md promises: macOS can panic with it."""
    assert [module for module, path in MODULES.items() if "set_wired_limit" in path.read_text()] == []
