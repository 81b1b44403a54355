"""Writes the screens anew: `python -m tests.screens`. Look at what `git diff` says of them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest does

from tests.screens.chat import SIZES, file_for, seen

for size in SIZES:
    file_for(*size).write_text(seen(*size))
