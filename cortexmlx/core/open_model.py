"""Open the model of an engine, here or on hosts."""

from __future__ import annotations

from collections.abc import Callable

from cortexmlx.core.config import EngineConfig
from cortexmlx.core.draft_model import open_draft
from cortexmlx.core.opened_model import OpenedModel
from cortexmlx.core.served_model import Call, ServedModel


def open_model(config: EngineConfig, wake: Callable[[Call], None], waiting: Callable[[], bool]) -> ServedModel:
    """Return the model of an engine with this configuration. `wake` and `waiting`: see `EngineCore`. Raises what
    `Engine` raises.
    """
    if config.hosts is not None:
        from cortexmlx.distributed.hosted_model import HostedModel

        return HostedModel(config, wake)
    draft = None if config.used_draft is None else open_draft(config, waiting)
    return OpenedModel(config, wake, waiting, draft)
