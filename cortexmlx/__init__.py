"""Language models on Apple Silicon: a paged KV arena, paged attention and continuous batching in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cortexmlx.errors import CortexError, KVCacheFull
from cortexmlx.request import Completion, FinishReason, SamplingParams, TokenEvent, Usage

if TYPE_CHECKING:
    from cortexmlx.engine import Engine
    from cortexmlx.kv.allocator import KVBlockAllocator, KVHandle

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "CortexError",
    "Engine",
    "FinishReason",
    "KVBlockAllocator",
    "KVCacheFull",
    "KVHandle",
    "SamplingParams",
    "TokenEvent",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import the engine (and with it mlx) only when somebody asks for it: `import cortexmlx` does no work."""
    if name == "Engine":
        from cortexmlx.engine import Engine

        return Engine
    if name in ("KVBlockAllocator", "KVHandle"):
        from cortexmlx.kv import allocator

        return getattr(allocator, name)
    raise AttributeError(f"module 'cortexmlx' has no attribute {name!r}")
