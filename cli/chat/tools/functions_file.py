"""The functions of a Python file as tools."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from cortexmlx.errors import InvalidRequest
from cortexmlx.structured.tools import Tool, read_tools


def load_tools(path: Path) -> tuple[Tool, ...]:
    """Import a Python file and return its functions as tools: those in `__all__`, or else those defined there whose
    names have no leading underscore.

    Raises InvalidRequest if the file cannot be imported, has no functions, or has one that cannot be a tool.
    """
    module = _import_file(path)
    if not (functions := _exported_functions(module)):
        raise InvalidRequest(f"{path} has no functions: define one with type hints, and a docstring that describes it")
    try:
        return read_tools(functions)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"{path}: {error} (a function whose name begins with _ is no tool)", field="tools"
        ) from None


def _import_file(path: Path) -> ModuleType:
    """Import a Python file as a module. Raises InvalidRequest if that fails."""
    if not path.is_file():
        raise InvalidRequest(f"{path} is not a file: tools are the functions of a Python file")
    loader = SourceFileLoader(f"cortexmlx_tools_of_{path.stem}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    if (folder := str(path.resolve().parent)) not in sys.path:  # what stands beside the file can be imported
        sys.path.append(folder)
    sys.modules[loader.name] = module  # type hints are read in the module
    try:
        loader.exec_module(module)
    except SyntaxError as error:
        raise InvalidRequest(f"{path} is no Python file: line {error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise InvalidRequest(f"{path} cannot be imported: {type(error).__name__}: {error}".removesuffix(": ")) from None
    return module


def _exported_functions(module: ModuleType) -> list[object]:
    """Return the functions that a module offers as tools."""
    names = getattr(module, "__all__", None)
    if names is not None:
        if not isinstance(names, (list, tuple)):
            raise InvalidRequest(f"{module.__file__}: `__all__` is {names!r:.80}, but must be a list of names")
        if missing_names := [name for name in names if not hasattr(module, name)]:
            raise InvalidRequest(
                f"{module.__file__}: `__all__` names {missing_names[0]!r}, which the file does not have"
            )
        return [getattr(module, name) for name in names]
    return [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
