"""Run what a page shows, and then more with what it has named: `FILE [NAME]` prints a JSON object of results.

FILE is the page's code. NAME is a module here whose functions take the names of that code. It runs in the environment
of the client, which has nothing else of these tests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
from pathlib import Path


def main(file: str, name: str | None = None) -> None:
    """Run it."""
    shown = io.StringIO()
    names: dict[str, object] = {"__name__": "shown"}
    with contextlib.redirect_stdout(shown):
        exec(compile(Path(file).read_text(), file, "exec", dont_inherit=True), names)
    results = {} if name is None else more(name, names)
    print(json.dumps({"shown": shown.getvalue(), **results}))


def more(name: str, names: dict[str, object]) -> dict[str, object]:
    """Return what the functions of a module here return."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    functions = {each: value for each, value in vars(module).items() if getattr(value, "__module__", "") == name}
    return {each: do(names) for each, do in functions.items() if callable(do) and not isinstance(do, type)}


if __name__ == "__main__":
    main(*sys.argv[1:])
