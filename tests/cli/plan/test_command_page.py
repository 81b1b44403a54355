"""A plan as a page: every figure with where it comes from, on eighty columns."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.cli.plan.command import plan_text
from cortexmlx.cli.planning.figures import make_plan
from cortexmlx.cli.planning.machine import TargetMachine
from cortexmlx.cli.planning.skeleton import build_skeleton
from cortexmlx.cli.planning.source import PlanSource
from cortexmlx.kv.sizing import ArenaDemand
from support.models.published import DEEPSEEK_V3, GEMMA3_1B, LLAMA4_SCOUT, MAMBA, QWEN3_8B
from support.models.tiny import CONFIGS

PLAMO3 = CONFIGS["llama"] | {"model_type": "plamo3", "sliding_window": 8, "sliding_window_pattern": 2}
MAC = TargetMachine(memory=48 * 2**30, working_set=36 * 2**30)


def page_of(config: dict[str, Any]) -> list[str]:
    return plan_text(
        make_plan(PlanSource("it", config, None), build_skeleton(config), MAC, load=ArenaDemand(16, 512))
    ).splitlines()


def test_the_page_of_a_model_whose_figures_are_known() -> None:
    lines = page_of(QWEN3_8B)
    assert lines[:4] == [
        "it: qwen3, 8.19 B parameters, context 40,960 tokens",
        "  weights         15.3 GiB    as stored",
        "  KV per token    144 KiB     36 layers x 8 heads x (128 + 128) x 2 bytes",
        "",
    ]
    assert lines[4] == "On this machine: 48 GiB, 36 GiB of it for models"
    table = lines[lines.index("     tokens   KV memory  sequences that fit into what is left for KV") + 1 :]
    assert [line.split()[0] for line in table] == ["4,096", "16,384", "40,960"]
    assert table[0].split()[1:3] == ["576", "MiB"]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            GEMMA3_1B,
            (
                "  KV per token    26 KiB      22 layers x 1 head x (256 + 256) x 2 bytes, window 512",
                "                              4 layers x 1 head x (256 + 256) x 2 bytes",
            ),
        ),
        (
            LLAMA4_SCOUT,
            (
                "36 layers x 8 heads x (128 + 128) x 2 bytes, chunks of 8,192",
                "                              12 layers x 8 heads x (128 + 128) x 2 bytes",
            ),
        ),
        (
            MAMBA,
            (
                "  KV per token    0 B         no layer keeps keys and values",
                "any length: what is kept does not grow with it",
                "  arena           0 B         tokens take none",
                "the rows, in recurrent layers",
                "states of beginnings that can be used again",
            ),
        ),
        (
            DEEPSEEK_V3,
            (
                "the weights alone are too large",
                "  arena           0 B         nothing is left for it",
                "61 layers x 1 head x (512 + 64) x 2 bytes",
            ),
        ),
        (PLAMO3, ("  cortexmlx does not run it yet: plamo3",)),
    ],
)
def test_every_kind_of_layer_and_of_shortage_has_its_words(config: dict[str, Any], says: tuple[str, ...]) -> None:
    text = "\n".join(page_of(config))
    assert [words for words in says if words not in text] == []


def test_a_model_of_one_request_at_a_time_says_so_and_has_no_tails(unpaged: None) -> None:
    lines = page_of(QWEN3_8B)
    text = " ".join(line.strip() for line in lines)
    assert "one request runs at a time, on mlx-lm's own caches. tiny: a test wants it so" in text
    assert "does not run it" not in text and any(line.startswith("  tails           0 B ") for line in lines)
    assert max(map(len, lines)) <= 80
