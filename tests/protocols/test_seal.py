"""Seal: what it signed is known again, and nothing else is."""

from __future__ import annotations

import base64

from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.protocols.seal import Seal

SEAL = Seal(b"a secret", "alice")


@given(st.text())
def test_what_was_sealed_is_read_again(text: str) -> None:
    assert SEAL.unwrap(SEAL.wrap(text)) == text
    assert SEAL.verify(text, SEAL.sign(text))
    assert Seal(b"a secret", "alice").unwrap(SEAL.wrap(text)) == text  # after a restart


@given(st.text(), st.text())
def test_nobody_else_can_seal(text: str, other: str) -> None:
    for seal in (Seal(b"a secret", "bob"), Seal(b"another secret", "alice")):
        assert seal.unwrap(SEAL.wrap(text)) is None
        assert not seal.verify(text, SEAL.sign(text))
    if other != text:
        assert not SEAL.verify(other, SEAL.sign(text))


@given(st.text(), st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_breaks_the_seal(text: str, place: int, change: int) -> None:
    data = bytearray(base64.b64decode(SEAL.wrap(text)))
    data[place % len(data)] ^= change
    assert SEAL.unwrap(base64.b64encode(bytes(data)).decode()) is None


@given(st.text() | st.binary().map(lambda data: base64.b64encode(data).decode()))
def test_nonsense_is_no_seal(nonsense: str) -> None:
    assert SEAL.unwrap(nonsense) is None
    assert not SEAL.verify("a thought", nonsense)
