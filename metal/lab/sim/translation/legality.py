"""Refuse text that is valid C++ but not valid Metal, before it first runs."""

import warnings
from functools import cache
from pathlib import Path

from cortexmlx.errors import KernelCompileError
from cortexmlx.metal.lab import legal
from cortexmlx.metal.lab.sim.built import cache_folder, content_key

SHOWN = 8


@cache
def _own_text() -> str:
    """Return the source of the checker, for the cache key: another version may refuse other texts."""
    folder = Path(legal.__file__).parent
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".h")]
    return "".join(path.read_text() for path in files)


@cache
def _warn_once() -> None:
    warnings.warn(
        "the simulator runs Metal text without judging whether Metal would take it: install the front end with "
        "`pip install libclang==18.1.1`",
        stacklevel=2,
    )


def check(name: str, text: str, preamble: str) -> None:
    """Refuse kernel text that a Metal compiler would refuse, as Metal 3.1 (macOS 14). The cache keeps accepted texts by
    content.

    Without the libclang wheel nothing is checked, and one warning says so.

    Raises:
        KernelCompileError: Metal would refuse the text. The message has a sentence and the line for the first
            complaints.
    """
    if not legal.available():
        _warn_once()
        return
    passed = cache_folder() / f"{content_key('legal', _own_text(), preamble, text)}.ok"
    if passed.exists():
        return
    found = legal.complaints(text, legal.Language.METAL_3_1, preamble)
    if found:
        lines = text.splitlines()
        said = [f'{name}: line {c.line}: {c.message} ("{lines[c.line - 1].strip()[:90]}")' for c in found[:SHOWN]]
        raise KernelCompileError("\n".join(said))
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.touch()
