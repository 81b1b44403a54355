"""What the page shows of the engines at this moment, as JSON: totals, and for one client also the map of blocks and the
open requests. Never a text, and never who asked.
"""

from __future__ import annotations

import gzip
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cortexmlx import __version__
from cortexmlx.errors import CortexError
from cortexmlx.server.web.http import dumped
from cortexmlx.stats import BlockMap, BlockState, EngineStats, Latency, RequestStats

if TYPE_CHECKING:
    from cortexmlx.engine import Engine

MOST_REQUESTS = 64
"""Open requests that are listed."""

_DIGITS = bytes(range(ord("0"), ord("0") + len(BlockState))) + bytes(256 - len(BlockState))
"""A block's state as a digit."""


class Live(NamedTuple):
    """The JSON, plain and compressed."""

    plain: bytes
    gzipped: bytes


def live(engines: Sequence[tuple[str, Engine]], whole: bool) -> Live:
    """Return the state of the engines that are open, each with the name of its model. They are asked on their threads.
    `whole`: with the map of blocks and the open requests, which tell a client of the requests of others.
    """
    body = {
        "version": __version__,
        "seconds": round(time.monotonic(), 3),
        "whole": whole,
        "states": [state.name.lower() for state in BlockState],
        "models": [_model(name, engine, whole) for name, engine in engines],
    }
    plain = dumped(body)
    return Live(plain, gzip.compress(plain, 1, mtime=0))


def _model(name: str, engine: Engine, whole: bool) -> dict[str, Any]:
    info = engine.info
    about = {
        "name": name,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "parameters": info.parameters,
        "weight_bytes": info.weight_bytes,
        "chat": info.chat_template,
    }
    try:
        stats = engine.stats()
        blocks = engine.blocks() if whole else None
        longest = engine.longest_request
    except CortexError:
        return {**about, "open": False}
    return {
        **about,
        "open": True,
        "longest": longest,
        **_totals(stats),
        "blocks": None if blocks is None else _map(blocks),
        "requests": [_request(each) for each in stats.requests[:MOST_REQUESTS]] if whole else None,
    }


def _totals(stats: EngineStats) -> dict[str, Any]:
    """Return the numbers that are the same for all clients."""
    store = stats.kv_store
    return {
        "running": stats.rows_running,
        "waiting": stats.rows_waiting,
        "rows": stats.max_rows,
        "finished": stats.requests_finished,
        "prompt_tokens": stats.prompt_tokens,
        "prefilled_tokens": stats.prefilled_tokens,
        "cached_tokens": stats.cached_tokens,
        "generated_tokens": stats.generated_tokens,
        "preemptions": stats.preemptions,
        "ttft": _latency(stats.time_to_first_token),
        "itl": _latency(stats.inter_token),
        "memory": {
            "active": stats.active_memory,
            "peak": stats.peak_memory,
            "kv": stats.kv_bytes,
            "kv_limit": stats.kv_bytes_limit,
            "kv_used": stats.kv_bytes_in_use,
        },
        "block_counts": {
            "total": stats.total_blocks,
            "used": stats.used_blocks,
            "shared": stats.shared_blocks,
            "cached": stats.cached_blocks,
        },
        "disk": None if store is None else {"written": store.stored_bytes, "read": store.read_bytes},
        "attention": stats.attention_backend,
    }


def _latency(latency: Latency) -> dict[str, float]:
    return {"count": latency.count, "p50": round(latency.p50, 5), "p99": round(latency.p99, 5)}


def _map(blocks: BlockMap) -> dict[str, Any]:
    groups = [
        {
            "layers": group.layers,
            "window": group.window,
            "block_bytes": group.block_bytes,
            "limit": group.limit,
            "states": group.states.translate(_DIGITS).decode(),
        }
        for group in blocks.groups
    ]
    return {"tokens": blocks.block_size, "groups": groups}


def _request(request: RequestStats) -> list[Any]:
    return [
        request.state.value,
        request.prompt_tokens,
        request.cached_tokens,
        request.computed_tokens,
        request.generated_tokens,
        request.max_tokens,
    ]
