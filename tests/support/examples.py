"""The programs of `examples/`, which are no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(path: str) -> Any:
    """The module in a file of `examples/`, imported anew."""
    spec = importlib.util.spec_from_file_location(f"example_{Path(path).stem}", EXAMPLES / path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
