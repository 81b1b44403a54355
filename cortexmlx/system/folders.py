"""The user's folders: for caches, and for what programs keep."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Return the program's folder among the user's caches: in `XDG_CACHE_HOME`, or else where the system has them."""
    usual = Path("Library", "Caches") if sys.platform == "darwin" else Path(".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / usual) / "cortexmlx"


def state_folder() -> Path:
    """Return the folder for what programs keep between runs, by the XDG convention."""
    state = os.environ.get("XDG_STATE_HOME") or home_folder() / ".local" / "state"
    return Path(state) / "cortexmlx"


def home_folder() -> Path:
    """Return the user's own folder, or a folder among the temporary files for a user without one, as in some
    containers.
    """
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"cortexmlx-{os.geteuid()}"
