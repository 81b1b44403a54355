"""The sections about KV memory: what is best, by how much, and in 80 columns."""

from __future__ import annotations

from cortexmlx.bench.report import memory
from cortexmlx.bench.report.memory import choices_section
from cortexmlx.bench.report.text import section_markdown
from cortexmlx.bench.suites.kernels import SHAPES, KernelSpeed
from cortexmlx.bench.suites.pool import NAIVE, POOL, PoolSizes, WriterResult
from cortexmlx.stats import ChoiceSource, TimedChoice


def words(text: str) -> str:
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


def test_the_pool_says_whether_it_reaches_its_target() -> None:
    def text(rate: float) -> str:
        found = [WriterResult(POOL, (rate, rate), 0), WriterResult(NAIVE, (1_000.0, 1_000.0), 2**20)]
        return words(section_markdown(memory.pool_section(found, PoolSizes())))

    assert "4.0x, target 3x: met" in text(4_000.0) and "2.9x, target 3x: missed" in text(2_900.0)


def test_kernels_say_what_was_measured_and_beside_which_peak() -> None:
    found = [KernelSpeed(SHAPES[0], name, (50.0, 52.0), 100.0) for name in ("cortexmlx", "MLX")]
    text = words(section_markdown(memory.kernel_section(found, "published for the M2 Max", gpu=False)))
    assert "| 51.0 | 50.0 to 52.0 | 51% |" in text and "peak: 100.0 GB/s, published" in text
    assert "no kernel of ours" in text
    assert "the Metal kernels" in words(section_markdown(memory.kernel_section(found, "x", gpu=True)))
    others = [*found, KernelSpeed(SHAPES[1], "MLX", (50.0,), 120.0)]
    assert "peak: 100.0 to 120.0 GB/s, x." in words(section_markdown(memory.kernel_section(others, "x", gpu=True)))


def test_the_fastest_is_first_and_the_one_that_serves_is_marked() -> None:
    found = [
        TimedChoice(
            "attention float16",
            "1 row",
            "vector kernel",
            ChoiceSource.TIMED,
            {"vector kernel": 12.4e-6, "matrix kernel": 12e-6},
            {"wide kernel": "it spills"},
        ),
        TimedChoice("attention float16", "2 rows", "vector kernel", ChoiceSource.RULE),
    ]
    part = choices_section(found)
    lines = [line for line in section_markdown(part).splitlines() if line.startswith("| 1 row")]
    assert [" ".join(line.split()) for line in lines] == [
        "| 1 row | matrix kernel | 12 | |",
        "| 1 row | vector kernel | 12 | serves |",
    ]
    assert "wide kernel cannot serve: it spills" in part.notes
    assert part.records[0]["seconds"] == {"vector kernel": 12.4e-6, "matrix kernel": 12e-6} and len(part.records) == 2
