"""Where programs keep what can be made again: one place for all that do."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The program's folder among the user's caches: in `XDG_CACHE_HOME`, else where the system has them."""
    usual = Path("Library", "Caches") if sys.platform == "darwin" else Path(".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / usual) / "cortexmlx"
