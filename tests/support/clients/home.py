"""Home: a client's own folders and environment. It reaches this machine only, and knows no real key."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.clients.installed import node
from support.patience import PATIENCE

_NOWHERE = "http://127.0.0.1:9"
"""A proxy that nobody listens at: whatever is asked of other machines fails at once."""


class Home:
    """The folders of one client, inside `folder`: its home, and `project`, which it works in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "home"
        self.project = folder / "project"
        self.folder.mkdir()
        self.project.mkdir()

    def run(
        self, command: Sequence[str | Path], environment: Mapping[str, str] = {}, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the project to its end."""
        return subprocess.run(
            [str(word) for word in command],
            cwd=self.project,
            env={**self._environment(), **environment},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def _environment(self) -> dict[str, str]:
        home = str(self.folder)
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), _NOWHERE)
        none = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        return {
            "PATH": f"{node()}:{os.defpath}:/usr/local/bin:/usr/bin:/bin",
            "HOME": home,
            "XDG_CONFIG_HOME": f"{home}/.config",
            "XDG_DATA_HOME": f"{home}/.local/share",
            "XDG_STATE_HOME": f"{home}/.local/state",
            "XDG_CACHE_HOME": f"{home}/.cache",
            "TMPDIR": home,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            **proxies,
            **{name.lower(): url for name, url in proxies.items()},
            **none,
        }
