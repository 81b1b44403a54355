"""Suggestions for a model name that was not found: similar names and files."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def hub_names() -> list[str]:
    """Return the names of the models of which the hub's cache holds some file, sorted. Only the list of folders is
    read.
    """
    from huggingface_hub import constants

    try:
        folders = [path.name for path in Path(constants.HF_HUB_CACHE).iterdir() if path.name.startswith("models--")]
    except OSError:
        return []
    return sorted(name.removeprefix("models--").replace("--", "/", 1) for name in folders)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ` Did you mean ...?` with the name that is closest to `name`, or an empty text if none is close. The
    candidates are `names` and the models in the folder of `name`.
    """
    here = {each.lower(): each for each in (*_beside(Path(name)), *names)}
    # Users often know a model's name but not its maker, so the part after the slash is also compared alone.
    here |= {each.lower().rpartition("/")[2]: each for each in here.values() if "/" in each and "/" not in name}
    close = difflib.get_close_matches(name.lower(), here, n=1, cutoff=0.75)
    return f" Did you mean {here[close[0]]!r}?" if close and here[close[0]] != name else ""


def _beside(path: Path) -> list[str]:
    """Return the models in the folder of `path`, written as `path` is."""
    try:
        inside = path.expanduser().parent.iterdir()
        others = [each for each in inside if each.suffix == ".gguf" or (each / "config.json").is_file()]
    except (OSError, RuntimeError):
        return []
    prefix = str(path).removesuffix(path.name)
    return [prefix + each.name for each in others]
