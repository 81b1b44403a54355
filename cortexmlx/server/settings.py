"""ServerSettings: whom a server answers, how much it takes, and what it logs."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.images import ReadElsewhere
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.types.progress import OnProgress
from cortexmlx.types.sampling_params import SamplingParams

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""The names of this machine for its own programs."""

SERVER_INSTALL = "pip install 'starlette>=1,<2' 'uvicorn>=0.40,<1' 'prometheus-client>=0.24,<1'"
"""Installs what a server needs, wherever this package is: an index may not have its extras, or a stranger's."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d{1,5})?")


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server: API keys, hosts, names of models, limits, defaults and logging."""

    keys: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    """The API keys, each with the name of its client. Clients share no prefixes, and take turns. Without keys everybody
    is answered, as one client.
    """
    hosts: tuple[str, ...] = LOOPBACK
    """The names that a request's `Host` may have while there are no keys. Pages of the web could reach the server under
    a name of their own otherwise (DNS rebinding). `*`: every name.
    """
    origins: tuple[str, ...] = ()
    """The origins of web pages that may ask, such as `https://example.com`; `*`: all of them."""
    names: tuple[str, ...] = ()
    """Other names of the model; of the first, if there are several."""
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Other names of several models, each with the model's own name."""
    any_name: bool = False
    """Whether the model answers under every name; the first, if there are several."""
    max_body: int = 16 << 20
    """Bytes of a request's body, at most."""
    body_seconds: float = 60.0
    """Seconds that a request's body may take to arrive."""
    max_open: int = 256
    """Requests that run or wait, at most. More are told to come again later (429)."""
    timeout: float | None = None
    """Seconds that a request may take, with the load of its model; None: any time."""
    quiet: float = 5.0
    """A stream that has said nothing for so many seconds says a comment, since clients give up on silence."""
    stored_bytes: int = 128 << 20
    """Bytes of memory for stored responses, at most. Each client has an equal share. 0: none are stored."""
    stored_count: int = 4096
    """Stored responses, at most. Each client has an equal share."""
    pull: Callable[[str, OnProgress], None] | None = None
    """Downloads a model by its hub id, on a thread, and adds it to the served ones; called with a function for the
    progress. Any client may ask for it, by Ollama's API. None: nobody may.
    """
    log: Callable[[LoggedRequest], None] | None = None
    """Called with each request when it has ended."""
    transcripts: int = 128 << 20
    """Bytes, roughly, that each model's transcripts may take: what it read and wrote, for an agent's next turn. 0: none
    are kept.
    """
    transcripts_folder: Path | None = None
    """A store's folder in which transcripts outlive the process, as their keys and values do; None: they do not."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """What thoughts are signed with, so that a client cannot put its own in their place. With a new secret, thoughts of
    earlier answers are left out.
    """
    read_elsewhere: ReadElsewhere | None = None
    """Reads images that requests only name, as `NamedImageReader.read` does; None: they are not read."""
    defaults: RequestDefaults = field(default_factory=lambda: RequestDefaults(SamplingParams(max_tokens=None)))
    """What a body does not set. A pool of models has defaults of its own for each: `ServedModel.defaults`."""

    def __post_init__(self) -> None:
        for name in ("max_body", "body_seconds", "max_open", "quiet"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}, but must be above 0", field=name)
        for name in ("stored_bytes", "stored_count"):
            if not getattr(self, name) >= 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}, but must be at least 0", field=name)
        if any(not key.isascii() or not key or key.strip() != key for key in self.keys):
            raise InvalidRequest("a key must be a text of ASCII characters, without blanks around it", field="keys")
        validate_origins(self.origins)


@dataclass(frozen=True)
class RequestTokens:
    """Token counts of one request, over all its answers: of the prompt, cached, and generated."""

    prompt: int
    cached: int
    answer: int


@dataclass(frozen=True)
class LoggedRequest:
    """One ended HTTP request for the log: method, path, status, duration and tokens, but never a key or a text."""

    method: str
    path: str
    status: int
    """499: the client went away before the whole answer was sent; 503: the server's end cut it. Also if a stream had
    begun with 200.
    """
    seconds: float
    tokens: RequestTokens | None
    model: str | None = None
    """The model that answered; None: none was asked."""


def validate_origins(origins: Iterable[str]) -> None:
    """Raise InvalidRequest for an allowed origin that no browser ever sends."""
    for origin in origins:
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise InvalidRequest(
                f"the origin {origin!r:.80} is none that a browser sends: write a scheme and a host in small letters, "
                "such as https://example.com or http://localhost:3000, or * for all pages",
                field="origins",
            )
