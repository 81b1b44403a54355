"""Errors keep their class, and what they have beside their message."""

from __future__ import annotations

import pytest

from cortexmlx.distributed.wire.codec import codec, named
from cortexmlx.errors import CortexError, HostLost, InvalidRequest, ModelNotFound
from support.hosts.values import ERRORS, same


@pytest.mark.parametrize("kind", ERRORS)
def test_every_class_comes_back(kind: type[CortexError]) -> None:
    assert len(ERRORS) > 20
    assert same(codec(CortexError).decode(bytes(codec(CortexError).encode(kind("why")))), kind("why"))


def test_a_class_of_another_module_becomes_the_nearest_of_ours() -> None:
    class NotOnTheHub(ModelNotFound):
        def __init__(self, name: str, place: str) -> None:
            super().__init__(f"{name} is not in {place}")

    error = codec(CortexError).decode(bytes(codec(CortexError).encode(NotOnTheHub("a", "b"))))
    assert type(error) is ModelNotFound and str(error) == "a is not in b"
    assert same(named(NotOnTheHub("a", "b"), "mac"), ModelNotFound("mac: a is not in b"))


def test_an_unknown_name_is_refused() -> None:
    message = bytes(codec(str).encode("SystemExit") + codec(str).encode("why") + b"\x01")
    with pytest.raises(HostLost, match="no error 'SystemExit'"):
        codec(CortexError).decode(message)


def test_a_copy_names_the_host_and_has_no_traceback() -> None:
    try:
        raise InvalidRequest("no", field="seed")
    except InvalidRequest as error:
        copy = named(error, "mac")
    assert same(copy, InvalidRequest("mac: no", field="seed")) and copy.__traceback__ is None
    assert same(named(ZeroDivisionError("odd"), "mac"), HostLost("mac: ZeroDivisionError: odd", host="mac"))
    assert same(named(HostLost("gone", host="b"), "a"), HostLost("a: gone", host="b"))
    assert same(named(HostLost("b is gone", host="b"), "a"), HostLost("b is gone", host="b"))
    assert same(named(HostLost("gone")), HostLost("gone"))
    silent = HostLost("the link to mac2, rank 1 is silent", host="mac2, rank 1")
    assert same(named(silent, "mac2, rank 1"), silent)
