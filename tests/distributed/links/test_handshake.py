"""Only who knows the key and runs the same is let in, and nothing that was recorded or changed proves anything."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cortexmlx.distributed.links import handshake
from cortexmlx.distributed.links.handshake import (
    MAGIC,
    SAID_BYTES,
    ConnectionPurpose,
    HandshakeError,
    HandshakeFault,
    HandshakeSide,
    Hello,
    Identity,
    admit_worker,
    check_key,
    describe_difference,
    introduce_worker,
    new_key,
)
from cortexmlx.errors import HostRefused
from support.effort import examples

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
SAME = {"mlx": "0.31.1", "weights": "cafe"}
SECRET_VERSION = {"mlx": "0.31.1-known-only-to-members"}


@dataclass
class Side:
    """One side of a handshake, and how it ended: with a result, with an error, or waiting for more."""

    talk: HandshakeSide[Any]
    said: bytes = b""
    result: Any = None
    error: Exception | None = None
    ended: bool = False
    _held: bytes = field(default=b"", init=False)
    _wanted: int = field(default=0, init=False)

    def hear(self, heard: bytes) -> bytes:
        """Take bytes, however cut, and return what is said then."""
        self._held += heard
        answer = b""
        try:
            while not self.ended:
                if not self._wanted:
                    wish = next(self.talk)
                elif len(self._held) < self._wanted:
                    break
                else:
                    given, self._held = self._held[: self._wanted], self._held[self._wanted :]
                    wish = self.talk.send(given)
                while isinstance(wish, bytes):
                    answer += wish
                    wish = next(self.talk)
                assert wish > 0
                self._wanted = wish
        except StopIteration as end:
            self.ended, self.result = True, end.value
        except (HostRefused, HandshakeError) as error:
            self.ended, self.error = True, error
        self.said += answer
        return answer


def controller(key: bytes = KEY, judge: Callable[[Hello, Identity], str | None] = lambda *_: None) -> Side:
    return Side(admit_worker(key, judge))


def hello(purpose: ConnectionPurpose = ConnectionPurpose.MESSAGES) -> Hello:
    return Hello(purpose, rank=3, epoch=7, session=b"s" * 16)


def worker(key: bytes = KEY, identity: Identity = SAME) -> Side:
    return Side(introduce_worker(key, hello(), identity))


def meet(one: Side, other: Side, change: Callable[[bytes, str], bytes] = lambda said, _: said, piece: int = 0) -> None:
    """Let both talk until neither says anything. `change` sees what each says, on the way."""
    to_controller = change(other.hear(b""), "worker")
    while to_controller:
        to_worker = b""
        for at in range(0, len(to_controller), piece or len(to_controller)):
            to_worker += one.hear(to_controller[at : at + (piece or len(to_controller))])
        to_controller = change(other.hear(change(to_worker, "controller")), "worker")


@settings(max_examples=examples(40))
@given(
    identity=st.dictionaries(st.text(max_size=20), st.text(max_size=60), max_size=6),
    purpose=st.sampled_from(ConnectionPurpose),
    piece=st.integers(0, 5),
)
def test_who_knows_the_key_is_admitted(identity: dict[str, str], purpose: ConnectionPurpose, piece: int) -> None:
    seen: list[tuple[Hello, Identity]] = []

    def judge(who: Hello, what: Identity) -> None:
        seen.append((who, what))

    said = hello(purpose)
    one, other = controller(judge=judge), Side(introduce_worker(KEY, said, identity))
    meet(one, other, piece=piece)
    assert one.ended and one.error is None and one.result == said
    assert other.ended and other.error is None
    assert seen == [(said, identity)]


def test_a_proof_is_an_hmac_of_all_that_was_said() -> None:
    one, other = controller(), worker()
    meet(one, other)
    hello_size = len(MAGIC) + 1 + 4 + 8 + 16 + 32
    first, second = other.said[:hello_size], other.said[hello_size:]
    challenge, proof, verdict = one.said[: len(MAGIC) + 32], one.said[len(MAGIC) + 32 :][:32], one.said[-34:]
    identity = second[34:]

    def of(*parts: bytes) -> bytes:
        return hmac.new(KEY, b"".join(parts), hashlib.sha256).digest()

    assert proof == of(b"controller", first, challenge)
    assert second[:32] == of(b"worker", first, challenge, identity)
    assert verdict == of(b"verdict", first, challenge, identity) + b"\0\0"


@given(place=st.integers(0, 140), bit=st.integers(0, 7), by=st.sampled_from(["worker", "controller"]))
def test_one_changed_bit_is_noticed(place: int, bit: int, by: str) -> None:
    """A changed length may let a side wait for more than comes: the clock ends that."""
    so_far = {"worker": 0, "controller": 0}
    changed = []

    def change(said: bytes, who: str) -> bytes:
        start = so_far[who]
        so_far[who] += len(said)
        if who != by or not start <= place < so_far[who]:
            return said
        changed.append(place)
        whole = bytearray(said)
        whole[place - start] ^= 1 << bit
        return bytes(whole)

    one, other = controller(), worker()
    meet(one, other, change)
    assume(changed)
    side = one if by == "worker" else other
    assert side.error is not None or not side.ended
    assert other.error is not None or not other.ended


def test_without_the_key_nothing_is_said_of_what_runs_here() -> None:
    def judge(*_: object) -> str:
        raise AssertionError("a stranger was judged")

    one, other = controller(OTHER_KEY, judge), worker(KEY, SECRET_VERSION)
    meet(one, other)
    assert isinstance(other.error, HostRefused) and "key" in str(other.error)
    assert b"known-only" not in other.said and not one.ended

    # A worker that goes on all the same, with a proof of another key.
    one, other = controller(KEY, judge), worker(OTHER_KEY)
    forged = other.hear(b"")
    one.hear(forged)
    length = (5).to_bytes(2, "big")
    one.hear(hmac.digest(OTHER_KEY, b"worker" + forged + one.said + b"hello", "sha256") + length + b"hello")
    assert isinstance(one.error, HandshakeError) and one.error.kind is HandshakeFault.KEY


def test_a_recorded_handshake_proves_nothing() -> None:
    one, other = controller(), worker()
    meet(one, other)
    assert other.ended and other.error is None

    again = controller()
    again.hear(other.said)
    assert isinstance(again.error, HandshakeError) and again.error.kind is HandshakeFault.KEY

    fooled = worker()
    fooled.hear(b"")
    fooled.hear(one.said)
    assert isinstance(fooled.error, HostRefused) and "key" in str(fooled.error)


def test_what_one_side_says_is_no_proof_of_the_other() -> None:
    """A worker that is sent back what it said, or the proof of the controller as its own."""
    mirrored = worker()
    mirrored.hear(mirrored.hear(b"") + bytes(32))
    assert isinstance(mirrored.error, HostRefused)

    one, other = controller(), worker()
    one.hear(other.hear(b""))
    one.hear(one.said[-32:] + b"\0\0")
    assert isinstance(one.error, HandshakeError) and one.error.kind is HandshakeFault.KEY


def test_a_refusal_reaches_the_worker_in_words() -> None:
    one, other = controller(judge=lambda *_: "rank 3 is here already"), worker()
    meet(one, other)
    assert str(other.error) == "rank 3 is here already"
    assert isinstance(one.error, HandshakeError) and one.error.kind is HandshakeFault.REFUSED
    one, other = controller(judge=lambda *_: "x" * 100_000), worker()
    meet(one, other)
    assert str(other.error) == "x" * SAID_BYTES


@given(st.binary(min_size=len(MAGIC) + 200, max_size=len(MAGIC) + 300))
@example(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(200))
@example((1 << 30).to_bytes(8, "big") + bytes(300))
def test_noise_is_refused_without_an_answer(noise: bytes) -> None:
    one = controller()
    assert one.hear(noise) == b""
    assert isinstance(one.error, HandshakeError) and one.error.kind is HandshakeFault.NOISE
    other = worker()
    other.hear(b"")
    other.hear(noise)
    assert isinstance(other.error, HostRefused) and "no controller" in str(other.error)


def test_another_version_of_the_protocol_is_told_so() -> None:
    old = MAGIC.replace(b"1", b"0")
    one = controller()
    assert one.hear(old + bytes(100)) == MAGIC
    assert isinstance(one.error, HandshakeError) and one.error.kind is HandshakeFault.VERSION
    other = worker()
    other.hear(b"")
    other.hear(old)
    assert isinstance(other.error, HostRefused) and "another version of this protocol" in str(other.error)


def test_a_length_beyond_the_limit_is_refused_before_it_is_read() -> None:
    one, other = controller(), worker()
    one.hear(other.hear(b""))
    one.hear(bytes(32) + (SAID_BYTES + 1).to_bytes(2, "big"))
    assert isinstance(one.error, HandshakeError) and one.error.kind is HandshakeFault.LENGTH
    with pytest.raises(HostRefused, match=f"more than {SAID_BYTES} bytes"):
        meet(controller(), fine := worker(identity={"weights": "x" * SAID_BYTES}))
        raise fine.error or AssertionError("it was taken")


def test_proofs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(handshake.hmac, "compare_digest", compare)  # type: ignore[attr-defined]
    meet(controller(), worker())
    assert [len(a) for a, _ in compared] == [32, 32, 32]


def test_a_difference_names_both_values_and_the_host() -> None:
    assert describe_difference("mac-2", SAME, dict(SAME)) is None
    assert describe_difference("mac-2", SAME | {"mlx": "0.30.0"}, SAME) == (
        "mac-2 has mlx 0.30.0, and the controller has mlx 0.31.1: both must be the same"
    )
    assert describe_difference("mac-2", {"mlx": "0.30.0"}, SAME) == (
        "mac-2 has mlx 0.30.0, weights unknown, and the controller has mlx 0.31.1, weights cafe: both must be the same"
    )
    assert describe_difference("mac-2", SAME | {"more": "1"}, SAME) is not None


def test_a_key_is_32_random_bytes() -> None:
    assert len({new_key() for _ in range(20)}) == 20
    check_key(new_key())
    for short in (b"", b"secret", bytes(31), bytes(33)):
        with pytest.raises(HostRefused, match=f"{len(short)}") as raised:
            check_key(short)
        assert "secret" not in str(raised.value)
