"""The handshake by which controller and worker prove that they know the group's key, and compare their versions.
Without mlx, sockets or clocks.

worker      MAGIC, hello: what the connection is for, rank, epoch, session, a nonce
    controller  MAGIC, a nonce, proof
    worker      proof, identity
    controller  proof, verdict: nothing, or the reason of a refusal

A proof is the HMAC-SHA256, by the group's key, of the speaker's role, all that both sides said so far, and what the
speaker says with it. Both nonces are in it, so a recorded handshake proves nothing. Nobody learns anything of this
side's versions without the key. Lengths are two bytes, and are checked before anything is read.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TypeVar

from cortexmlx.errors import HostRefused

KEY_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
SAID_BYTES = 8192
"""The longest identity, and the longest verdict."""

FAMILY = b"cortexmlx hosts "
MAGIC = FAMILY + b"1\n"
"""Begins what both sides say. The number is the version of the whole protocol, of its messages too."""

HELLO = struct.Struct(">BIQ16s32s")
LENGTH = struct.Struct(">H")

Identity = Mapping[str, str]
"""What must be equal on both sides, by name: versions of packages, the hash of the weights."""

T = TypeVar("T")
HandshakeSide = Generator[int | bytes, bytes, T]
"""One side of a conversation. It yields bytes to send, or how many bytes (at least 1) it must be given next."""


class ConnectionPurpose(IntEnum):
    """What a connection is for. A link has one connection of each purpose."""

    MESSAGES = 1
    HEARTBEATS = 2


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's first message in the handshake."""

    purpose: ConnectionPurpose
    rank: int
    epoch: int
    session: bytes
    """16 random bytes, the same for both connections of a link."""
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))

    def pack(self) -> bytes:
        return HELLO.pack(self.purpose, self.rank, self.epoch, self.session, self.nonce)


class HandshakeFault(StrEnum):
    """Why the controller refused a connection, before or during its handshake. Each kind is logged once."""

    ADDRESS = "its address is not one of the group's hosts"
    NOISE = "it does not speak this protocol"
    VERSION = "it speaks another version of this protocol: install the same cortexmlx there"
    LENGTH = "it announced more than is allowed"
    KEY = "it does not know the group's key"
    SLOW = "it did not end its handshake in time"
    CROWD = "too many connections are waiting"
    LEFT = "it went away before it was known"
    REFUSED = "it knows the key but is not awaited"


class HandshakeError(Exception):
    """The controller refuses a connection. A worker with the key is told why, others at most the protocol's version."""

    def __init__(self, kind: HandshakeFault, detail: str = "") -> None:
        super().__init__(f"{kind.value} ({detail})" if detail else kind.value)
        self.kind = kind


def new_key() -> bytes:
    """Return a new group key: 32 random bytes. Give it to workers by environment or file, never by command line."""
    return secrets.token_bytes(KEY_BYTES)


def check_key(key: bytes) -> None:
    """Raise HostRefused unless a key has the right length."""
    if len(key) != KEY_BYTES:
        raise HostRefused(f"the key of a group of hosts has {KEY_BYTES} bytes, and this one {len(key)}: use new_key()")


def admit_worker(key: bytes, judge: Callable[[Hello, Identity], str | None]) -> HandshakeSide[Hello]:
    """Run the controller's side of the handshake. `judge` returns why a worker that knows the key is refused, or None.

    Returns the hello of a worker that was accepted. Raises HandshakeError.
    """
    if (magic := (yield len(MAGIC))) != MAGIC:
        if magic.startswith(FAMILY):
            yield MAGIC
            raise HandshakeError(HandshakeFault.VERSION)
        raise HandshakeError(HandshakeFault.NOISE)
    fields = yield HELLO.size
    purpose, rank, epoch, session, nonce = HELLO.unpack(fields)
    if purpose not in list(ConnectionPurpose):
        raise HandshakeError(HandshakeFault.NOISE)
    hello = Hello(ConnectionPurpose(purpose), rank, epoch, session, nonce)
    challenge = MAGIC + secrets.token_bytes(NONCE_BYTES)
    transcript = MAGIC + fields + challenge
    yield challenge + _proof(key, b"controller", transcript)

    proof, length = yield from _read_header()
    if length > SAID_BYTES:
        raise HandshakeError(HandshakeFault.LENGTH, f"{length} bytes")
    packed = (yield length) if length else b""
    transcript += packed
    if not hmac.compare_digest(proof, _proof(key, b"worker", transcript)):
        raise HandshakeError(HandshakeFault.KEY)

    reason = judge(hello, _decode_identity(packed))
    verdict = (reason or "").encode()[:SAID_BYTES]
    yield _proof(key, b"verdict", transcript + verdict) + LENGTH.pack(len(verdict)) + verdict
    if reason is not None:
        raise HandshakeError(HandshakeFault.REFUSED, reason)
    return hello


def introduce_worker(key: bytes, hello: Hello, identity: Identity) -> HandshakeSide[None]:
    """Run the worker's side of the handshake. Raises HostRefused if the controller refuses, or is another one."""
    fields = hello.pack()
    yield MAGIC + fields
    magic = yield len(MAGIC)
    if magic != MAGIC:
        if magic.startswith(FAMILY):
            raise HostRefused("it speaks another version of this protocol: install the same cortexmlx on both machines")
        raise HostRefused("it is no controller of cortexmlx")
    nonce = yield NONCE_BYTES
    transcript = MAGIC + fields + MAGIC + nonce
    if not hmac.compare_digest((yield PROOF_BYTES), _proof(key, b"controller", transcript)):
        raise HostRefused("it does not know this group's key, or has another one")

    packed = _encode_identity(identity)
    transcript += packed
    yield _proof(key, b"worker", transcript) + LENGTH.pack(len(packed)) + packed
    proof, length = yield from _read_header()
    if length > SAID_BYTES:
        raise HostRefused(f"it announced a verdict of {length} bytes, and {SAID_BYTES} are allowed")
    verdict = (yield length) if length else b""
    if not hmac.compare_digest(proof, _proof(key, b"verdict", transcript + verdict)):
        raise HostRefused("its verdict is not signed by this group's key")
    if verdict:
        raise HostRefused(verdict.decode(errors="replace"))


def describe_difference(name: str, worker_identity: Identity, controller_identity: Identity) -> str | None:
    """Describe in words how a worker's identity differs from the controller's; None if they are equal."""
    differing_keys = [
        key
        for key in sorted(worker_identity.keys() | controller_identity.keys())
        if worker_identity.get(key) != controller_identity.get(key)
    ]
    if not differing_keys:
        return None
    worker_values = ", ".join(f"{key} {worker_identity.get(key, 'unknown')}" for key in differing_keys)
    controller_values = ", ".join(f"{key} {controller_identity.get(key, 'unknown')}" for key in differing_keys)
    return f"{name} has {worker_values}, and the controller has {controller_values}: both must be the same"


def _read_header() -> HandshakeSide[tuple[bytes, int]]:
    """Read a proof, and the length of the message that it is for."""
    head = yield PROOF_BYTES + LENGTH.size
    return head[:PROOF_BYTES], LENGTH.unpack(head[PROOF_BYTES:])[0]


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    """Return the HMAC of a role and all messages so far. No role is the beginning of another, and each side knows
    the size of all parts but the last, so no two look alike.
    """
    return hmac.digest(key, role + transcript, "sha256")


def _encode_identity(identity: Identity) -> bytes:
    """Encode an identity as bytes. Raises HostRefused if it is too long."""
    texts = [text.encode() for pair in sorted(identity.items()) for text in pair]
    if any(len(text) > SAID_BYTES for text in texts) or sum(len(text) + LENGTH.size for text in texts) > SAID_BYTES:
        raise HostRefused(f"the names and values of an identity have more than {SAID_BYTES} bytes")
    return b"".join(LENGTH.pack(len(text)) + text for text in texts)


def _decode_identity(packed: bytes) -> dict[str, str]:
    """Decode a worker's identity (names and values). Damaged bytes give one that equals no other."""
    texts = []
    while packed:
        (length,) = LENGTH.unpack(packed[: LENGTH.size].rjust(LENGTH.size, b"\0"))
        texts.append(packed[LENGTH.size : LENGTH.size + length].decode(errors="replace"))
        packed = packed[LENGTH.size + length :]
    return dict(zip(texts[::2], texts[1::2], strict=False))
