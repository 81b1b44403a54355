"""How a model's thoughts are shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Folding:
    """Whether the thoughts of the answers to come are one line each."""

    folded: bool = False
