"""What clients can learn of each other: nothing, however often they ask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.errors import InvalidRequest
from support.engine.core_driver import Driver, assert_nothing_lost
from support.models.tiny import tokens_of

SECRET = [31, 7, 54, 18]
REST = tokens_of(32, seed=2)
ALPHABET = range(64)


def cached(driver: Driver, prompt: Sequence[int], client: str | None) -> int:
    """`usage.cached_tokens` of one request."""
    return driver.result_of(prompt, 1, client=client).usage.cached_tokens


def guessed(driver: Driver, known: Sequence[int], length: int, client: str | None) -> list[int]:
    """`length` tokens behind `known` in somebody's prompt: each time the first that more of is cached with."""
    found = list(known)
    for _ in range(length):
        hits = (token for token in ALPHABET if cached(driver, [*found, token, 255], client) > len(found))
        if (hit := next(hits, None)) is None:
            break
        found.append(hit)
    return found[len(known) :]


@pytest.mark.parametrize(
    ("prefix", "thief", "share"), [(1, "thief", False), (20, None, False), (40, "thief", False), (20, "thief", True)]
)
def test_a_client_cannot_guess_anothers_prompt_token_by_token(
    tiny: Any, prefix: int, thief: str | None, share: bool
) -> None:
    """Where clients share, the same attack finds every token."""
    driver = Driver(tiny("one layer"), tokens=8192, block_size=32, share_prefixes_between_clients=share)
    known = tokens_of(prefix, seed=3)
    assert cached(driver, [*known, *SECRET, *REST], "victim") == 0
    assert guessed(driver, known, len(SECRET), thief) == (SECRET if share else [])
    assert_nothing_lost(driver.core.stats())


class Impostor(str):
    """A name whose methods say that it is the victim's."""

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return b"victim"

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("victim")


def test_a_name_with_methods_of_its_own_finds_nothing_of_anothers(tiny: Any) -> None:
    prompt = tokens_of(40, seed=6)
    with Engine(tiny("one layer"), kv_memory="128KB", block_size=8) as engine:
        ask = SamplingParams(max_tokens=1)
        engine.submit(prompt, ask, client="victim").result()
        assert engine.submit(prompt, ask, client="victim").result().usage.cached_tokens >= 32
        assert engine.submit(prompt, ask, client=Impostor("thief")).result().usage.cached_tokens == 0
        with engine.pin(tokens_of(40, seed=7), client=Impostor("thief")):
            assert engine.submit(tokens_of(40, seed=7), ask, client="victim").result().usage.cached_tokens == 0
            assert engine.submit(tokens_of(40, seed=7), ask, client="thief").result().usage.cached_tokens >= 32


@pytest.mark.parametrize("client", [5, b"one", ("one", 1)])
def test_a_client_that_is_no_text_is_refused_at_once(tiny: Any, client: Any) -> None:
    with Engine(tiny("one layer")) as engine, pytest.raises(InvalidRequest, match=r"client is .* must be a text"):
        engine.submit(tokens_of(20), client=client)


@pytest.mark.parametrize("share", [False, True])
def test_an_engine_shares_between_clients_only_if_asked(tiny: Any, share: bool) -> None:
    model: Path = tiny("one layer")
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    with Engine(model, block_size=8, kv_memory="1MB", share_prefixes_between_clients=share) as engine:
        prompt = tokens_of(40, seed=5)
        usage = [engine.submit(prompt, params, client=c).result().usage for c in ("one", "other", "", "one\udc80")]
    assert [u.cached_tokens for u in usage] == [0, *[39 if share else 0] * 3]
