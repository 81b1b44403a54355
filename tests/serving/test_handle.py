"""A request as its caller sees it: its events, its end, and who is told of it."""

from __future__ import annotations

from typing import Any

from cortexmlx import Engine, SamplingParams
from support.tiny import tokens_of

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
PROMPT = tokens_of(20, seed=1)


def test_a_handle_keeps_its_engine_until_the_request_has_ended(tiny: Any) -> None:
    handle = Engine(tiny("llama"), kv_memory="256KB", block_size=8).submit(PROMPT, LONG)
    assert len(handle.result(30).token_ids) == 400
