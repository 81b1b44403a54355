"""The API keys of a server: from a file, and from the environment. Never from the command line, which others see."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

from cortexmlx.errors import InvalidRequest

KEY = "CORTEXMLX_API_KEY"
"""The environment variable with a key."""


def keys_in(path: Path | None) -> dict[str, str]:
    """Return the keys, each with the name of its client. A file has a key in each line; what comes after a blank is the
    client's name, and # begins a remark. Raises InvalidRequest.
    """
    keys: dict[str, str] = {}
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the keys in {path} cannot be read: {error}") from None
        for line in lines:
            key, _, name = line.partition("#")[0].strip().partition(" ")
            if key:
                keys[key] = name.strip() or _named(key)
        if not keys:
            raise InvalidRequest(f"{path} has no keys: write one into each line")
    if own := os.environ.get(KEY, "").strip():
        keys.setdefault(own, _named(own))
    return keys


def _named(key: str) -> str:
    """Return a client's name that does not tell its key."""
    return f"key {sha256(key.encode()).hexdigest()[:8]}"
