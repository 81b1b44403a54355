"""Images that a request names instead of sending them: files in a folder, and what listed hosts of the web give.

Whoever writes a request chooses the name. So nothing is read but what whoever starts the program has listed.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from cortexmlx.errors import InvalidRequest
from cortexmlx.models.messages import one_line
from cortexmlx.vision.images import MAX_FILE_BYTES, read_file

FETCH_SECONDS = 10.0
"""Seconds that an image may take, with the look-up of its host's name."""

MAX_FETCHES = 8
"""Images that are fetched at a time: each holds a thread."""

_NAT64, _OLD = ("64:ff9b::/96", "64:ff9b:1::/48", "::ffff:0:0:0/96"), ("2002::/16", "2001::/32", "::/96", "fec0::/10")
_NOT_GLOBAL = [ipaddress.ip_network(each) for each in (*_NAT64, *_OLD)]
"""Addresses in which others are hidden, by NAT64, 6to4, Teredo and what came before, and those of sites."""


class NamedImageReader:
    """Reads images that a request only names: by URL from listed `hosts`, or by path from the folder `root`, if any.

    A host is `example.com` or `example.com:8443`, which are asked by https, or begins with `http://`. One whose name
    stands for an address of this machine or of a private network is not asked: list the address itself.
    """

    def __init__(self, hosts: Iterable[str] = (), root: Path | None = None) -> None:
        """Raises InvalidRequest if one of the `hosts` is not a valid host."""
        self._root = root
        self._hosts = {_origin(each if "://" in each else f"https://{each}") for each in hosts}
        self._fetching = threading.BoundedSemaphore(MAX_FETCHES)

    def read(self, name: str) -> bytes:
        """Return the bytes of the file at a URL or a path. Raises InvalidRequest."""
        if re.match("(?i)https?://", name):
            return self._fetch_url(name)
        if self._root is None:
            raise InvalidRequest("the image is at no URL of http or https, and files are not opened: send its bytes")
        return self._read_local_file(self._root, name)

    @staticmethod
    def _read_local_file(root: Path, name: str) -> bytes:
        try:
            path = Path(os.path.realpath(root / name, strict=True))
            is_there = path.is_relative_to(os.path.realpath(root))
        except (OSError, ValueError):
            is_there = False
        if not is_there:
            raise InvalidRequest(f"there is no file {name[:200]!r} in {root}, which images are read from")
        return read_file(path)[1]

    def _fetch_url(self, url: str) -> bytes:
        try:
            parts, origin = urlsplit(url), _origin(url)
        except (InvalidRequest, ValueError):
            raise InvalidRequest("the image's URL cannot be read") from None
        if origin not in self._hosts:
            raise InvalidRequest(
                f"the image is at {_origin_text(*origin)}, which is not listed: send its bytes, or have whoever runs "
                "this list it with --fetch-images"
            )
        if not self._fetching.acquire(timeout=FETCH_SECONDS):
            raise InvalidRequest(f"the image was not fetched: {MAX_FETCHES} others are, and none ended in time")
        try:
            return _request_body(parts, *origin)
        except InvalidRequest:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a closed socket, a bad header
            raise InvalidRequest(f"the image was not fetched from {_origin_text(*origin)}: {one_line(error)}") from None
        finally:
            self._fetching.release()


def _origin(url: str) -> tuple[str, str, int]:
    """Return the scheme, host and port of a URL. Raises InvalidRequest."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        host = ""
    if not host or parts.username is not None or parts.password is not None:
        raise InvalidRequest(f"{url[:200]!r} is no host that images can be fetched from: give one like example.com")
    return parts.scheme, host, port


def _origin_text(scheme: str, host: str, port: int) -> str:
    text = "".join(each if each.isprintable() else "?" for each in host[:200])  # a log may be on a terminal
    return f"{scheme}://{f'[{text}]' if ':' in text else text}:{port}"


def _request_body(url: SplitResult, scheme: str, host: str, port: int) -> bytes:
    """Request a URL and return the reply's body. Raises OSError, HTTPException and InvalidRequest."""
    end = time.monotonic() + FETCH_SECONDS
    address = _find_address(host, port, end)  # what is checked is what is asked, whatever the name stands for later
    connection = http.client.HTTPConnection(host, port)
    connection.sock = sock = socket.create_connection((address, port), timeout=max(end - time.monotonic(), 0.01))
    sock.settimeout(max(end - time.monotonic(), 0.01))
    if scheme == "https":
        connection.sock = sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
    cut = threading.Timer(end - time.monotonic(), lambda: _shut_down(sock))  # hosts that send a byte a second end, too
    cut.start()
    try:
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        connection.request("GET", path, headers={"Accept": "image/*", "Connection": "close"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise InvalidRequest(
                f"the image's host says {reply.status} {one_line(reply.reason)}"
                f"{'; it is not followed elsewhere' * (300 <= reply.status < 400)}: give the image's own URL"
            )
        data = reply.read(MAX_FILE_BYTES + 1)
        if time.monotonic() >= end:
            raise TimeoutError(f"it took more than {FETCH_SECONDS:g} seconds")
        return data
    finally:
        cut.cancel()
        connection.close()


def _shut_down(sock: socket.socket) -> None:
    """Shut a socket down, so that a thread stops waiting for it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _find_address(host: str, port: int, end: float) -> str:
    """Look up a host's name until the time `end`, and return a public IP address. Return an IP address unchanged."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    answer = Future[list[Any]]()

    def look_up() -> None:  # a thread of its own, which ends when the system's resolver gives up
        try:
            answer.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, ValueError) as error:
            answer.set_exception(error)

    threading.Thread(target=look_up, daemon=True).start()
    try:
        found = {str(info[4][0]) for info in answer.result(max(end - time.monotonic(), 0))}
    except TimeoutError:
        raise TimeoutError(f"its name was not looked up in {FETCH_SECONDS:g} seconds") from None
    for text in sorted(found):
        address = ipaddress.ip_address(text.partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        hidden = any(address.version == each.version and address in each for each in _NOT_GLOBAL)
        if address.is_global and not address.is_multicast and not hidden:
            return text
    raise InvalidRequest(
        f"{host} stands for {', '.join(sorted(found))}, which is not on the internet: list the address"
    )
