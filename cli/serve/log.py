"""The line of a request in the log of a server."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from enum import StrEnum

from cortexmlx.cli.terminal.harmless import in_a_line
from cortexmlx.server.settings import LoggedRequest


class LogFormat(StrEnum):
    """The lines of a log."""

    text = "text"
    json = "json"
    none = "none"


def line_of(logged: LoggedRequest, form: LogFormat, now: float) -> str:
    """Return the line of a request that ended `now`, in seconds since 1970."""
    if form is LogFormat.json:
        counts = {} if logged.tokens is None else asdict(logged.tokens)
        parts = {name: value for name, value in asdict(logged).items() if name != "tokens"}
        return json.dumps({"time": round(now, 3), **parts, "seconds": round(logged.seconds, 4), **counts})
    at = time.strftime("%H:%M:%S", time.localtime(now))
    line = f"{at} {logged.method} {in_a_line(logged.path)[:100]} {logged.status} {logged.seconds:.2f} s"
    if logged.model is not None:
        line += f" · {in_a_line(logged.model)[:100]}"
    if (tokens := logged.tokens) is None:
        return line
    cached = f" ({tokens.cached:,} cached)" if tokens.cached else ""
    return f"{line} · {tokens.prompt:,}{cached} + {tokens.answer:,} tokens"


def event_line(text: str, form: LogFormat, now: float) -> str:
    """Return the line of an event of the server `now`, in seconds since 1970: a model was loaded, or unloaded."""
    if form is LogFormat.json:
        return json.dumps({"time": round(now, 3), "event": text})
    return f"{time.strftime('%H:%M:%S', time.localtime(now))} {in_a_line(text)}"
