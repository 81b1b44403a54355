"""The user's cache folder."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """The program's folder among the user's caches: in `XDG_CACHE_HOME`, else where the system has them."""
    usual = Path("Library", "Caches") if sys.platform == "darwin" else Path(".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / usual) / "cortexmlx"


def home_folder() -> Path:
    """The user's own folder. One who has none, as in some containers, has one among the temporary files."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"cortexmlx-{os.geteuid()}"
