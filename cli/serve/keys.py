"""How a server is asked: its address, and its API keys, from a file and from the environment. Never from the command
line, which others see.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import socket
import ssl
import urllib.request
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit

from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.disk.folder import SECRET, open_folder, open_regular_file
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.system.files import lock_folder, state_folder

KEY_VARIABLE = "CORTEXMLX_API_KEY"
"""The environment variable with a key."""

RUNNING_URL = "http://127.0.0.1:8000"
"""Where `cortexmlx serve` listens, unless it is told otherwise."""


def server_url(text: str) -> str:
    """Return a server's URL, without the /v1 that OpenAI's clients add to it. Without a scheme, it is asked by HTTP. A
    number, or one after a colon, is a port of this machine.
    """
    url = text.rstrip("/").removesuffix("/v1")
    if (port := url.removeprefix(":")).isdecimal():
        url = f"127.0.0.1:{port}"
    return url if "://" in url else f"http://{url}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Takes a redirect as an error: it would carry the key to wherever it leads."""

    def redirect_request(self, *args: Any, **named: Any) -> None:
        """Return no further request."""


def ask_server(url: str, path: str, key: str, body: bytes | None = None, *, seconds: float) -> Any:
    """Return what a server says of `path`, as JSON, within `seconds`. No proxy reads along. Raises CortexError if the
    host is unknown, does not speak HTTPS or is not trusted, and else what urllib and json raise.
    """
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
    try:
        with opener.open(urllib.request.Request(url + path, body, headers), timeout=seconds) as reply:
            return json.load(reply)
    except URLError as error:
        if isinstance(error.reason, socket.gaierror):
            name = to_single_line(urlsplit(url).hostname or "")
            raise CortexError(f"no machine is known by the name {name}: check the address (--url)") from None
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            untrusted = f"{to_single_line(url)} shows a certificate that is not trusted here"
            advice = "use the address that it is for, or name its file in the environment as SSL_CERT_FILE"
            raise CortexError(f"{untrusted} ({error.reason.verify_message}): {advice}") from None
        if isinstance(error.reason, ssl.SSLError):
            plain = to_single_line(url.replace("https", "http", 1))
            raise CortexError(f"the server answers by http only: give {plain} (--url)") from None
        raise


def read_keys(path: Path | None) -> dict[str, str]:
    """Read the API keys, each with the name of its client. A file has a key in each line; what comes after a blank is
    the client's name, and # begins a remark, but not inside of a key. Raises InvalidRequest.
    """
    keys: dict[str, str] = {}
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the keys in {path} cannot be read: {error}") from None
        for line in lines:
            key, *name = re.split(r"(?:^|\s)#", line)[0].split(maxsplit=1) or [""]
            if key:
                keys[key] = "".join(name).strip() or _anonymous_name(key)
        if not keys:
            raise InvalidRequest(f"{path} has no keys: write one into each line")
    if environment_key := os.environ.get(KEY_VARIABLE, "").strip():
        keys.setdefault(environment_key, _anonymous_name(environment_key))
    return keys


def _anonymous_name(key: str) -> str:
    """Return a client name that does not reveal its key."""
    return f"key {sha256(key.encode()).hexdigest()[:8]}"


# The secret of the servers of one user, which outlives them.


_LOST_ADVICE = "Conversations with thoughts from before are refused."


def secret_folder() -> Path:
    """Return the folder of the signing secret, which is in a file that only this user can read."""
    return state_folder() / "server"


def load_secret() -> bytes:
    """Return the secret that signs thoughts, so that a server accepts those of an earlier one. It is created once, and
    is the same for servers that start at the same time.

    A damaged secret, or one that others could read, is made anew. If none can be kept, it lasts as long as the server.
    Both are told.
    """
    path = secret_folder() / SECRET
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as stack:
            with suppress(OSError):  # a file system without locks; else two servers could both replace a damaged secret
                stack.enter_context(lock_folder(path.parent, fcntl.LOCK_EX))
            old_secret = _read_head(path)
            secret = open_folder(path.parent)
    except OSError as error:
        console.print_message(to_single_line(f"the server's secret cannot be kept in {path}: {error}. {_LOST_ADVICE}"))
        return secrets.token_bytes(32)
    if old_secret not in (None, secret):
        console.print_message(
            to_single_line(f"the server's secret in {path} was damaged or open to others: it is new. {_LOST_ADVICE}")
        )
    return secret


def _read_head(path: Path) -> bytes | None:
    """Return the first bytes of a file; None if it cannot be read."""
    with suppress(OSError), open_regular_file(path) as file:
        return file.read(64)
    return None
