"""What the page gets: totals for all, the map of blocks and the open requests for one client, and no texts."""

from __future__ import annotations

import gzip
import json
from typing import Any

from cortexmlx import Engine
from cortexmlx.server.monitoring import MOST_REQUESTS, LiveState, live
from cortexmlx.stats import BlockMap, BlockState, GroupBlocks

SECRET = "A secret question that nobody else may read"


def body(found: LiveState) -> Any:
    assert gzip.decompress(found.gzipped) == found.plain
    return json.loads(found.plain)


class Looks:
    """An engine with another map of blocks."""

    def __init__(self, engine: Engine, states: bytes) -> None:
        self.info, self.longest_request, self.stats = engine.info, engine.longest_request, engine.stats
        self._states = states

    def blocks(self) -> BlockMap:
        return BlockMap(16, (GroupBlocks(2, None, 1024, len(self._states), self._states),))


def test_it_has_the_engines_numbers_and_blocks(engine: Engine) -> None:
    engine.generate(SECRET, max_tokens=9)
    found = body(live([("tiny", engine)], whole=True))
    [model], stats, blocks = found["models"], engine.stats(), engine.blocks()
    assert model["name"] == "tiny" and model["open"] and model["longest"] == engine.longest_request
    assert model["generated_tokens"] == stats.generated_tokens and model["rows"] == stats.max_rows
    states = [bytes(map(int, group["states"])) for group in model["blocks"]["groups"]]
    assert states == [group.states for group in blocks.groups] and model["blocks"]["tokens"] == blocks.block_size
    assert found["states"] == [state.name.lower() for state in BlockState] and model["requests"] == []


def test_open_requests_are_numbers_without_texts_and_clients(engine: Engine) -> None:
    handle = engine.submit(SECRET, max_tokens=3000, ignore_eos=True, client="somebody")
    next(iter(handle))
    found = live([("tiny", engine)], whole=True)
    [[state, prompt, cached, computed, answer, most]] = body(found)["models"][0]["requests"]
    assert state == "decoding" and prompt == engine.count_tokens(SECRET) and most == 3000
    assert cached <= prompt <= computed and 1 <= answer < most
    assert b"secret" not in found.plain and b"somebody" not in found.plain
    many = [engine.submit("x", max_tokens=3000, ignore_eos=True) for _ in range(MOST_REQUESTS + 9)]
    assert len(body(live([("tiny", engine)], whole=True))["models"][0]["requests"]) == MOST_REQUESTS
    for each in (handle, *many):
        each.cancel()
        each.result()


def test_a_hundred_thousand_blocks_are_compact(engine: Engine) -> None:
    states = bytes(BlockState(each % 5) for each in range(100_000))
    looks: Any = Looks(engine, states)
    found = live([("tiny", looks)], whole=True)
    assert bytes(map(int, body(found)["models"][0]["blocks"]["groups"][0]["states"])) == states
    assert len(found.plain) < 110_000 and len(found.gzipped) < 5_000


def test_any_name_is_json(engine: Engine) -> None:
    for name in ('</script><img onerror="x">', "a\nb", "half \udc80", ""):
        assert body(live([(name, engine)], whole=True))["models"][0]["name"] == name
