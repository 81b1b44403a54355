"""Monitoring endpoints: the web page at `/`, its data at `/live`, and Prometheus metrics at `/metrics`."""

from __future__ import annotations

import asyncio
import gzip
import re
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from cortexmlx import __version__
from cortexmlx.core.blocking_calls import run_on_thread
from cortexmlx.errors import CortexError
from cortexmlx.server.http import to_json_bytes
from cortexmlx.server.metrics import CONTENT_TYPE, ServerCounters, render_metrics
from cortexmlx.server.models import ModelDirectory
from cortexmlx.server.settings import ServerSettings
from cortexmlx.stats import BlockMap, BlockState, EngineStats, Latency

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


LIVE_PATH = "/live"


class MonitoringEndpoints:
    """The HTTP endpoints for watching the server. All viewers together ask the engines only a few times a second."""

    def __init__(self, models: ModelDirectory, settings: ServerSettings, tally: ServerCounters) -> None:
        self._models = models
        self._settings = settings
        # What one client does is nothing to another: several of them see totals.
        include_details = len(set(settings.keys.values())) <= 1
        started = time.time()
        self._live_state = SharedResult(lambda: live_state(models.loaded_engines(), include_details))
        self._metrics = SharedResult(lambda: render_metrics(models.loaded_engines(), tally, started))

    async def root(self, request: Request) -> Response:
        """Handle GET `/`: return the monitoring page to browsers, else the model's name, hidden with API keys."""
        if "text/html" in request.headers.get("accept", ""):  # not a program such as curl
            return page_response()
        name = "" if self._settings.keys else f": {self._models.default_name}"
        return Response(f"cortexmlx{name}\n".encode("utf-8", "replace"), media_type="text/plain")

    async def live(self, request: Request) -> Response:
        """Handle GET `/live`: return the JSON that the monitoring page shows."""
        state = await self._live_state.get()
        headers = {"cache-control": "no-store", "vary": "accept-encoding", "x-content-type-options": "nosniff"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
        body = state.gzip_data if "content-encoding" in headers else state.json_data
        return Response(body, headers=headers, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        """Handle GET `/metrics`: return all metrics as Prometheus text."""
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return Response(await self._metrics.get(), headers=headers, media_type=CONTENT_TYPE)


# What the page shows of the engines at this moment, as JSON: totals, and for one client also the map of blocks and the
# open requests. Never a text, and never who asked.


MAX_LISTED_REQUESTS = 64
"""Open requests that are listed."""

_STATE_DIGITS = bytes(range(ord("0"), ord("0") + len(BlockState))) + bytes(256 - len(BlockState))
"""A block's state as a digit."""


class LiveState(NamedTuple):
    """The JSON that the monitoring page shows, plain and compressed."""

    json_data: bytes
    gzip_data: bytes


def live_state(engines: Sequence[tuple[str, Engine]], include_details: bool) -> LiveState:
    """Return the JSON state of the open engines for the monitoring page. They are asked on their threads.
    `include_details`: with the map of blocks and the open requests, which would tell one client about another.
    """
    body = {
        "version": __version__,
        "seconds": round(time.monotonic(), 3),
        "whole": include_details,
        "states": [state.name.lower() for state in BlockState],
        "models": [_model_state(name, engine, include_details) for name, engine in engines],
    }
    json_data = to_json_bytes(body)
    return LiveState(json_data, gzip.compress(json_data, 1, mtime=0))


def _model_state(name: str, engine: Engine, include_details: bool) -> dict[str, Any]:
    """Return the state of one engine, or only its model's description if it is closed."""
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
        blocks = engine.blocks() if include_details else None
        longest_request = engine.longest_request
    except CortexError:
        return {**about, "open": False}
    return {
        **about,
        "open": True,
        "longest": longest_request,
        **_engine_totals(stats),
        "blocks": None if blocks is None else _block_map(blocks),
        "requests": [_request_row(each) for each in stats.requests[:MAX_LISTED_REQUESTS]] if include_details else None,
    }


def _engine_totals(stats: EngineStats) -> dict[str, Any]:
    """Return an engine's counters and sizes, which every client may see."""
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
        "ttft": _latency_summary(stats.time_to_first_token),
        "itl": _latency_summary(stats.inter_token),
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


def _latency_summary(latency: Latency) -> dict[str, float]:
    """Return the count, median and 99th percentile of a latency."""
    return {"count": latency.count, "p50": round(latency.p50, 5), "p99": round(latency.p99, 5)}


def _block_map(blocks: BlockMap) -> dict[str, Any]:
    """Return the state of every KV block, one digit each, by group of layers."""
    groups = [
        {
            "layers": group.layers,
            "window": group.window,
            "block_bytes": group.block_bytes,
            "limit": group.limit,
            "states": group.states.translate(_STATE_DIGITS).decode(),
        }
        for group in blocks.groups
    ]
    return {"tokens": blocks.block_size, "groups": groups}


_request_row = attrgetter(
    "state.value", "prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens", "max_tokens"
)
"""Returns one open request as the page's table has it: its state and five token counts."""


# The page at `/`: one file without data, and the headers that keep it from loading or running anything else.


_PAGE_FILE = "index.html"


@cache
def _load_page() -> tuple[bytes, str]:
    """Load the page's HTML and build its content security policy: only its own script and styles, and this server."""
    text = files(__package__).joinpath(_PAGE_FILE).read_text(encoding="utf-8")
    rules = [
        "default-src 'none'",
        f"script-src {_inline_hashes('script', text)}",
        f"style-src {_inline_hashes('style', text)}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return text.encode(), "; ".join(rules)


def _inline_hashes(tag: str, text: str) -> str:
    """Return the hashes by which a content security policy allows the inline `tag` elements of a page's HTML."""
    inside = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in inside)


def page_response() -> Response:
    """Return the monitoring page, with its security headers."""
    content, policy = _load_page()
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": policy,
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "vary": "accept",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
    }
    return Response(content, headers=headers, media_type="text/html")


# SharedResult: one result for all who ask at the same time, so that many viewers cost an engine no more than one.


T = TypeVar("T")

MIN_INTERVAL = 0.25
"""Seconds between two calls, at least."""


class SharedResult(Generic[T]):
    """Caches the result of `make` for concurrent callers: one call at a time on a thread, at most one every `interval`
    seconds. A caller in between gets the newest result, or its error.
    """

    def __init__(self, make: Callable[[], T], interval: float = MIN_INTERVAL) -> None:
        self._make = make
        self._interval = interval
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None
        self._next_time = 0.0

    async def get(self) -> T:
        """Return the newest result, or raise its error. A cancelled caller does not end the call of the others."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._loop is not loop or (self._task.done() and time.monotonic() >= self._next_time):
            self._loop, self._task = loop, loop.create_task(self._make_on_thread())
            self._task.add_done_callback(_retrieve_error)
        return await asyncio.shield(self._task)

    async def _make_on_thread(self) -> T:
        try:
            return await run_on_thread(self._make)
        finally:
            self._next_time = time.monotonic() + self._interval


def _retrieve_error(task: asyncio.Task[T]) -> None:
    """Read the error of a finished call, so that asyncio does not log it if its callers have gone."""
    if not task.cancelled():
        task.exception()
