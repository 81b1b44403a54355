"""What there is one of says so, to who copies it, sends it to another process, or prints it."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from cortexmlx import Engine
from support.engine.asked import LONG, PROMPT, SHORT
from support.engine.core_driver import finally_nothing_lost
from support.patience import PATIENCE


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_neither_an_engine_nor_what_it_gave_is_copied(engine: Engine, how: Callable[[Any], Any]) -> None:
    """Nor is anything cancelled by a copy that is dropped."""
    stream = engine.stream(PROMPT, SHORT)
    for each in (engine, engine.submit(PROMPT, SHORT), stream, engine.astream(PROMPT), engine.as_completed([PROMPT])):
        with pytest.raises(TypeError, match=f"{type(each).__name__} objects cannot be copied, pickled or.*Make an Eng"):
            how(each)
    gc.collect()
    assert sum(event.token_id is not None for event in stream) == 12
    finally_nothing_lost(engine)


def test_what_is_printed_says_which_it_is_and_how_far(engine: Engine) -> None:
    name = engine.info.name
    handle = engine.submit(PROMPT, LONG)
    next(iter(handle))
    stream = engine.stream(PROMPT, SHORT)
    assert (repr(engine), repr(handle)) == (f"<Engine {name}>", f"<RequestHandle {handle.id}: decoding>")
    assert repr(engine.pin([1] * 20)) == "<Pin: 16 tokens>"
    handle.cancel()
    handle.result(PATIENCE)
    assert repr(handle) == f"<RequestHandle {handle.id}: cancelled>"
    list(stream)
    assert repr(stream) == f"<TokenStream of <RequestHandle {handle.id + 1}: finished>>"
    assert max(len(repr(look)) for look in (engine.blocks(), engine.stats())) < 3000
    engine.close()
    assert repr(engine) == f"<Engine {name}, closed>"


def test_a_subclass_that_has_not_begun_is_printed(tiny: Any) -> None:
    class Mine(Engine):
        def __init__(self) -> None:
            assert repr(self) == "<Mine, closed>"
            super().__init__(tiny("one layer"), kv_memory="64KB", block_size=8)

    with Mine() as mine:
        assert repr(mine).startswith("<Mine /") and mine.generate(PROMPT, SHORT).token_ids
