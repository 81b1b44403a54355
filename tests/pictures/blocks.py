"""The picture of an arena at work for the documentation, made by the program itself:
`python -m tests.pictures.blocks smollm2 > docs/blocks.svg`.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
import time
from random import Random
from typing import TYPE_CHECKING

from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.blockmap import draw_blocks
from cortexmlx.stats import BlockMap, BlockState
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.engine import Engine

WIDTH = 88
FEW, MANY = SamplingParams(max_tokens=4, ignore_eos=True), SamplingParams(max_tokens=200, n=3, ignore_eos=True)
PATIENCE_SECONDS = 60.0


def scene(engine: Engine) -> BlockMap:
    """An arena with blocks of every kind. Requests run meanwhile, so on a busy machine it takes more than one try."""
    until = time.monotonic() + PATIENCE_SECONDS
    look = one_look(engine)
    while not all(look.count(state) for state in BlockState) and time.monotonic() < until:
        look = one_look(engine)
    return look


def one_look(engine: Engine) -> BlockMap:
    """The arena with what earlier requests left, three answers to one prompt, and a request that begins like one of the
    earlier.
    """
    most = engine.longest_request // 16
    engine.generate(words(2 * most, 1), FEW)
    until = time.monotonic() + PATIENCE_SECONDS
    while not engine.blocks().count(BlockState.STORED) and time.monotonic() < until:
        time.sleep(0.05)
    running = [engine.submit(words(most, 2), MANY), engine.submit(words(most, 1) + words(most, 3), MANY)]
    for handle in running:
        next(event for event in handle if event.token_id is not None)
    engine.generate(words(most, 4), FEW)
    look = engine.blocks()
    for handle in running:
        handle.cancel()
    return look


def words(count: int, seed: int) -> list[int]:
    """Any tokens."""
    chosen = Random(seed)
    return [chosen.randrange(10, 60) for _ in range(count)]


def svg(look: BlockMap) -> str:
    """What `/blocks` prints, as a picture that needs nothing from elsewhere."""
    from rich.console import Console

    screen = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    screen.print(">>> /blocks")
    for line in draw_blocks(look, WIDTH, 24):
        screen.print(line)
    return re.sub(r"\s*@font-face \{.*?\}\n", "\n", screen.export_svg(title="the KV arena"), flags=re.DOTALL)


def main() -> None:
    """Draw the arena of the model that the command line names."""
    from cortexmlx.engine import Engine

    with (
        tempfile.TemporaryDirectory() as store,
        Engine(sys.argv[1], kv_memory="256MB", block_size=16, max_rows=8, kv_store=store) as engine,
    ):
        console.print_result(svg(scene(engine)))


if __name__ == "__main__":
    main()
