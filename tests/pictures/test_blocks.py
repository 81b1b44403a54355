"""The picture in the documentation: of a real arena, with every kind of block, and nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cortexmlx import BlockState, Engine
from cortexmlx.cli.terminal.blockmap import STATE_STYLES
from tests.pictures.blocks import scene, svg


def test_it_shows_blocks_of_every_kind(tiny: Any, tmp_path: Path) -> None:
    with Engine(tiny("llama"), kv_memory="256KB", block_size=8, max_rows=8, kv_store=tmp_path) as engine:
        look = scene(engine)
    assert all(look.count(state) for state in BlockState)
    drawn = svg(look)
    assert all(each.cell in drawn for each in STATE_STYLES.values()) and "@font-face" not in drawn
    assert set(re.findall(r"https?://[^\s\"]+", drawn)) <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}


def test_the_one_in_the_documentation_shows_them_too() -> None:
    drawn = (Path(__file__).parents[2] / "docs" / "blocks.svg").read_text()
    assert all(each.cell in drawn and each.name in drawn.replace("&#160;", " ") for each in STATE_STYLES.values())
