"""Takes out of a text what says who and where somebody is: names of the user and the host, and paths."""

from __future__ import annotations

import getpass
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cortexmlx.system.files import home_folder

_PATH = re.compile(r"(?<![\w./~>-])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\:'\",;()<>]+[/\\])+[^\s/\\:'\",;()<>]*")
"""An absolute path of two or more parts."""

_QUOTED = re.compile(r"""(['"])(?:~|[A-Za-z]:)?[/\\](?:(?!\1)[^\n]){2,}\1""")
"""An absolute path in quotes, as in Python's errors. It may have spaces."""

_PLAIN = re.compile(r"[-+\w.]{1,20}")
"""Values of variables that are told: numbers and words."""


class Impersonal:
    """Replaces the user's and the host's names, and all paths, in texts."""

    def __init__(self) -> None:
        paths = sorted({p for p in _paths() if len(p) > 1}, key=len, reverse=True)
        self._known = re.compile(rf"(?:{'|'.join(map(re.escape, paths)) or '(?!)'})(?:[/\\][^\s'\",;()<>]*)?")
        words = "|".join(map(re.escape, sorted(set(_names()), key=len, reverse=True))) or "(?!)"
        self._words = re.compile(rf"(?<![A-Za-z0-9])(?:{words})(?![A-Za-z0-9])", re.IGNORECASE)

    def text(self, text: str) -> str:
        """Return a text without names and paths."""
        text = _QUOTED.sub(r"\1<path>\1", text)
        return self._words.sub("<name>", _PATH.sub("<path>", self._known.sub("<path>", text)))

    def data(self, value: Any) -> Any:
        """Return data of JSON with all of its texts changed, those of keys excepted."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {str(key): self.data(each) for key, each in value.items()}
        if isinstance(value, Sequence):
            return [self.data(each) for each in value]
        return value if value is None or isinstance(value, (bool, int, float)) else self.text(str(value))


def _paths() -> Iterator[str]:
    places = [home_folder(), Path(tempfile.gettempdir()), Path(sys.prefix), Path(sys.base_prefix)]
    with suppress(OSError):  # somebody has removed it
        places.append(Path.cwd())
    for path in places:
        yield from (str(path), os.path.realpath(path))
    for name, value in os.environ.items():
        if name.endswith(("_HOME", "_CACHE", "_PATH", "_STORE", "_DIR")) and os.path.isabs(value):
            yield value


def _names() -> Iterator[str]:
    """Yield the names by which the user and the host are known; parts of them, too."""
    found = [platform.node(), platform.node().partition(".")[0], home_folder().name, os.environ.get("USER", "")]
    try:
        found.append(getpass.getuser())
        import pwd

        whole = pwd.getpwuid(os.getuid()).pw_gecos.partition(",")[0]
        found += [whole, *whole.split()]
    except (ImportError, KeyError, OSError):  # a system, or a container, that does not name its users
        pass
    yield from (name for name in found if len(name) > 2)


def variables() -> dict[str, str]:
    """Return the variables of the environment that change what runs, with those values that are numbers or words."""
    wanted = ("MLX_", "CORTEXMLX_", "OPENBLAS_", "OMP_", "METAL_", "MTL_")
    hidden = ("KEY", "TOKEN", "SECRET")
    return {
        name: value if _PLAIN.fullmatch(value) and not any(word in name for word in hidden) else "<set>"
        for name, value in sorted(os.environ.items())
        if name.startswith(wanted)
    }
