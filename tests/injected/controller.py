"""A controller that is killed: `python -m tests.injected.controller MODEL HOSTS MOMENT`. It opens an engine, prints
"at MOMENT" when it is there, and stays there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest does

from cortexmlx import Engine
from support.models.tiny import tokens_of

LONG, SHORT = 1500, 20
"""Tokens of the prompts."""


def main(model: str, hosts: str, moment: str) -> None:
    """Be killed."""
    if moment == "loading":
        print("at loading", flush=True)
    with Engine(model, hosts=hosts, kv_memory="8MB", prefill_budget=32) as engine:
        if moment == "prefill":
            handle = engine.submit(tokens_of(LONG), max_tokens=1)
            while not engine.stats().prefilled_tokens:
                assert not handle.ended
        elif moment == "decode":
            next(iter(engine.submit(tokens_of(SHORT), max_tokens=2000, ignore_eos=True)))
        print(f"at {moment}", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
