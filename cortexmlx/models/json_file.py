"""JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cortexmlx.errors import ModelCorrupt
from cortexmlx.models.messages import LFS_POINTER, not_readable, not_the_file, one_line


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises ModelCorrupt, naming the file, when it cannot be read or is something else."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelCorrupt(not_readable(path, error)) from error
    if data.startswith(LFS_POINTER):
        raise ModelCorrupt(not_the_file(path))
    if not data.strip():
        raise ModelCorrupt(f"{path} is empty. Download it again.")
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelCorrupt(f"{path} cannot be read as JSON: {one_line(error)}. Download it again.") from error
    if not isinstance(content, dict):
        raise ModelCorrupt(f"{path} is not a JSON object. Download it again.")
    return content
