"""The first line of a chat whose model is too large for this machine."""

from __future__ import annotations

import sys

from cortexmlx.cli.terminal import console
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import CortexError
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.models.hub import cached_folder
from cortexmlx.models.inventory import list_models, stored_bytes
from cortexmlx.models.resolve import SourceKind, resolve_model
from cortexmlx.system.machine import working_set_bytes

_TOKENS = 4096
"""The length of the text that has to fit beside the weights."""

_GROWTH = 10
"""Memory over file size that no model exceeds: a CPU widens 4 bits to 32. Smaller models are not planned."""

_MAX_TRIED, _MAX_NAMED = 6, 3


def shortage_line(config: EngineConfig) -> str:
    """Return by how much a model is too large for this machine, and which of the models here fit. Empty if it fits, if
    it runs on other hosts, or if its size cannot be computed: loading it tells why then.
    """
    budget = working_set_bytes()
    try:
        if config.hosts is not None or not _may_be_too_large(str(config.model), budget):
            return ""
        needed = _needed_bytes(config)
    except (CortexError, OSError):
        return ""
    if needed <= budget:
        return ""
    fitting = _fitting_models(config, budget)
    advice = f"Of the models here, {', '.join(fitting)} would fit" if fitting else "No model here would fit"
    sizes = f"{format_bytes(needed)} with a text of {_TOKENS:,} tokens, {format_bytes(needed - budget)}"
    return (
        f"{config.model} takes {sizes} more than this machine has for models ({format_bytes(budget)}): it may be very "
        f"slow, or fail. {advice}; `cortexmlx plan` says it of any other."
    )


def _may_be_too_large(name: str, budget: int) -> bool:
    """Whether a model may not fit: its files are large, or they are not here and a person waits (at a terminal)."""
    source = resolve_model(name)
    path = cached_folder(name) if source.kind is SourceKind.HUB else source.path
    return console.is_terminal(sys.stderr) if path is None else stored_bytes(path) * _GROWTH > budget


def _needed_bytes(config: EngineConfig) -> int:
    """Return the bytes of memory that a model takes with one text. Raises what `cortexmlx plan` raises."""
    from cortexmlx.cli.serve.pool import ModelPlanner

    return ModelPlanner(str(config.model), config).needed_bytes(_TOKENS)


def _fitting_models(config: EngineConfig, budget: int) -> list[str]:
    """Return the names of the largest models on this machine that would fit."""
    names: list[str] = []
    smaller = sorted((each for each in list_models() if each.size < budget), key=lambda each: -each.size)
    for model in smaller[:_MAX_TRIED]:
        try:
            if len(names) < _MAX_NAMED and _needed_bytes(EngineConfig(model.name, max_rows=config.max_rows)) <= budget:
                names.append(model.name)
        except (CortexError, OSError):
            continue
    return names
