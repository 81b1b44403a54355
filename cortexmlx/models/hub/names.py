"""Suggestions for a model name that was not found: similar names and files."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def hub_names() -> list[str]:
    """The models of which the hub's cache holds something, by name. Only the folder's list is read."""
    from huggingface_hub import constants

    try:
        folders = [path.name for path in Path(constants.HF_HUB_CACHE).iterdir() if path.name.startswith("models--")]
    except OSError:
        return []
    return sorted(name.removeprefix("models--").replace("--", "/", 1) for name in folders)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` Did you mean ...?` with the closest of `names` and of the files beside `name`; empty if none is close."""
    here = {each.lower(): each for each in (*_beside(Path(name)), *names)}
    # A model's name is often known and its maker's not: the part behind the slash counts by itself, too.
    here |= {each.lower().rpartition("/")[2]: each for each in here.values() if "/" in each and "/" not in name}
    close = difflib.get_close_matches(name.lower(), here, n=1, cutoff=0.75)
    return f" Did you mean {here[close[0]]!r}?" if close and here[close[0]] != name else ""


def _beside(path: Path) -> list[str]:
    """The models in the folder where `path` would be, written as `path` is."""
    try:
        inside = path.expanduser().parent.iterdir()
        others = [each for each in inside if each.suffix == ".gguf" or (each / "config.json").is_file()]
    except (OSError, RuntimeError):
        return []
    prefix = str(path).removesuffix(path.name)
    return [prefix + each.name for each in others]
