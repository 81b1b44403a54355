"""Language models on Apple Silicon: a paged KV arena, paged attention and continuous batching in one process."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from cortexmlx.errors import *  # noqa: F403  Every error and statistic has its name here, too,
from cortexmlx.errors import CortexError
from cortexmlx.stats import *  # noqa: F403  until a release says otherwise: new code takes it from its module.
from cortexmlx.stats import EngineStats, ModelInfo
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.structured.tools import CallDelta, Tool, ToolCall
from cortexmlx.types.cache_report import CacheReport, RecomputeReason
from cortexmlx.types.embeddings import EmbeddingInfo, Embeddings, Reranking
from cortexmlx.types.logprobs import PromptLogprobs, TokenLogprob
from cortexmlx.types.messages import ChatPrompt
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import Completion, FinishReason, Message, RequestState, Timings, TokenEvent, Usage
from cortexmlx.types.sampling_params import LogitsProcessor, SamplingParams

if TYPE_CHECKING:
    from cortexmlx.core.as_completed import AsCompleted
    from cortexmlx.core.handle import RequestHandle
    from cortexmlx.core.prompt import Prompt
    from cortexmlx.core.streams import AsyncTokenStream, TokenStream
    from cortexmlx.engine import Engine
    from cortexmlx.kv.allocator import KVBlockAllocator, KVHandle
    from cortexmlx.models.adapters.low_rank import AdapterInfo
    from cortexmlx.perplexity import Perplexity
    from cortexmlx.sessions.conversation import Conversation, Question
    from cortexmlx.sessions.pin import Pin
    from cortexmlx.sessions.reply import AsyncReply, Reply
    from cortexmlx.sessions.tool_rounds import ToolEvent

__version__ = "0.1.0"

__all__ = [
    "AdapterInfo",
    "AsCompleted",
    "AsyncReply",
    "AsyncTokenStream",
    "CacheReport",
    "CallDelta",
    "ChatPrompt",
    "Completion",
    "Conversation",
    "CortexError",
    "EmbeddingInfo",
    "Embeddings",
    "Engine",
    "EngineStats",
    "FinishReason",
    "KVBlockAllocator",
    "KVHandle",
    "LogitsProcessor",
    "Message",
    "ModelInfo",
    "Perplexity",
    "Pin",
    "Progress",
    "Prompt",
    "PromptLogprobs",
    "Question",
    "RecomputeReason",
    "Reply",
    "RequestHandle",
    "RequestState",
    "Reranking",
    "SamplingParams",
    "StructuredOutput",
    "Timings",
    "TokenEvent",
    "TokenLogprob",
    "TokenStream",
    "Tool",
    "ToolCall",
    "ToolEvent",
    "Usage",
    "__version__",
]

# A program that sets up no logging hears nothing: without a handler Python itself prints warnings.
logging.getLogger("cortexmlx").addHandler(logging.NullHandler())

if not TYPE_CHECKING:  # a type checker that saw it would accept every name
    _HOMES = {
        "AdapterInfo": "cortexmlx.models.adapters.low_rank",
        "Engine": "cortexmlx.engine",
        "KVBlockAllocator": "cortexmlx.kv.allocator",
        "KVHandle": "cortexmlx.kv.allocator",
        "Perplexity": "cortexmlx.perplexity",
        "AsCompleted": "cortexmlx.core.as_completed",
        "RequestHandle": "cortexmlx.core.handle",
        "Prompt": "cortexmlx.core.prompt",
        "AsyncTokenStream": "cortexmlx.core.streams",
        "TokenStream": "cortexmlx.core.streams",
        "Conversation": "cortexmlx.sessions.conversation",
        "Question": "cortexmlx.sessions.conversation",
        "Pin": "cortexmlx.sessions.pin",
        "AsyncReply": "cortexmlx.sessions.reply",
        "Reply": "cortexmlx.sessions.reply",
        "ToolEvent": "cortexmlx.sessions.tool_rounds",
    }

    def __getattr__(name: str) -> object:
        """Import the engine only when somebody asks for it: `import cortexmlx` does no work."""
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'cortexmlx' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """Return the names that a program may use, without those imported here for other reasons."""
        return sorted([*__all__, "errors", "stats"])
