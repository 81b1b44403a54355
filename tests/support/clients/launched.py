"""`cortexmlx launch` with a model that greets: `python launched.py ARGS`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[up]) for up in (2, 3)]

GREETING = "Hello, I was launched."


def answer(turns: Any) -> str:
    """What the model writes: a greeting, or the title of it."""
    return GREETING if turns[0].role == "tools" else "A greeting"


def main() -> int:
    """Run it."""
    from cortexmlx import SamplingParams
    from cortexmlx.cli.serve.pool import DefaultSettings
    from cortexmlx.cli.start import run
    from cortexmlx.protocols.request import RequestDefaults
    from support.clients.scripted import Script

    def resolve(self: Any, engine: Any) -> RequestDefaults:
        return RequestDefaults(SamplingParams(max_tokens=None, logits_processors=[Script(engine, answer)]))

    DefaultSettings.resolve = resolve  # type: ignore[method-assign]
    return run(["launch", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
