"""`cortexmlx cache why`: ask a running server what it computed again, and why."""

from __future__ import annotations

import http.client
import json
import os
import time
from contextlib import closing
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from cortexmlx.cli.serve.keys import KEY_VARIABLE
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.errors import CortexError

_SECONDS = 10.0
"""How long the server may take."""


def why(
    url: Annotated[str, typer.Option("--url", metavar="URL", help="The server.")] = "http://127.0.0.1:8000",
    count: Annotated[int, typer.Option("--last", "-n", metavar="N", min=1, help="The last N prompts.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
) -> None:
    """Ask a running server why it computed prompts again: the first difference, and how many tokens it cost.

    It tells of the prompts of the same key only, which it takes from CORTEXMLX_API_KEY. The last 20 are remembered.
    """
    reports = fetch_reports(url, os.environ.get(KEY_VARIABLE, "").strip())[:count]
    if as_json:
        console.print_result(json.dumps(reports, indent=2))
        return
    if not reports:
        console.print_note("the server remembers no prompt of this key")
    for report in reversed(reports):
        when = time.strftime("%H:%M:%S", time.localtime(report["time"]))
        console.print_result(
            f"{when} · {to_single_line(report['model'])} · prompt {report['prompt_tokens']:,} tokens: "
            f"{report['memory_tokens']:,} found in memory, {report['disk_tokens']:,} on disk"
        )
        console.print_result(f"  {to_single_line(report['text'])}")


def fetch_reports(url: str, key: str) -> list[dict[str, Any]]:
    """Return what a server reports of a key's prompts, the newest first. Raises CortexError."""
    address = urlsplit(url if "://" in url else f"http://{url}")
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    path, headers = f"{address.path.rstrip('/').removesuffix('/v1')}/cache/why", {"authorization": f"Bearer {key}"}
    try:
        with closing(kind(address.hostname or "", address.port, timeout=_SECONDS)) as connection:
            connection.request("GET", path, headers=headers if key else {})
            reply = connection.getresponse()
            status, body = reply.status, reply.read()
        if status == 401:
            raise CortexError(f"the server at {url} wants a key: put yours into {KEY_VARIABLE}")
        return [dict(report) for report in json.loads(body)["reports"]]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise CortexError(
            f"no server of cortexmlx explains its cache at {url} ({type(error).__name__}): start one with `cortexmlx "
            "serve`, or give its address (--url)"
        ) from error
