"""JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cortexmlx.errors import ModelCorrupt
from cortexmlx.models.messages import LFS_POINTER, lfs_pointer_message, one_line, unreadable_message


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises ModelCorrupt with the file's name if it cannot be read or is something
    else.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelCorrupt(unreadable_message(path, error)) from error
    if data.startswith(LFS_POINTER):
        raise ModelCorrupt(lfs_pointer_message(path))
    if not data.strip():
        raise ModelCorrupt(f"{path} is empty. Download it again.")
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelCorrupt(f"{path} cannot be read as JSON: {one_line(error)}. Download it again.") from error
    if not isinstance(content, dict):
        raise ModelCorrupt(f"{path} is not a JSON object. Download it again.")
    return content
