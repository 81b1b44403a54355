"""JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cortexmlx.errors import ModelCorrupt
from cortexmlx.models.messages import one_line


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises ModelCorrupt, naming the file, when it cannot be read or is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelCorrupt(f"{path} cannot be read: {one_line(error)}. Download it again.") from error
    if not isinstance(content, dict):
        raise ModelCorrupt(f"{path} is not a JSON object. Download it again.")
    return content
