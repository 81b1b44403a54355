"""The budget of a chip: exact arithmetic, and the figures worked out by hand before the sheet was written."""

from __future__ import annotations

from fractions import Fraction

import pytest

from cortexmlx.metal.chips import CHIPS

KV_BYTES = 2 * 128 * 2


@pytest.mark.parametrize("name", CHIPS)
def test_the_budget_is_the_time_of_the_bytes_in_scheduler_cycles(name: str) -> None:
    chip = CHIPS[name]
    seconds = Fraction(KV_BYTES) / (Fraction(chip.bandwidth) * 10**9)
    wanted = seconds * chip.cores * 4 * Fraction(chip.clock) * 10**9
    assert chip.budget(KV_BYTES) == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize(("name", "cycles"), [("M2 Max", 272), ("M4 Max", 237), ("M5", 217), ("M5 Max", 216)])
def test_known_budgets_of_a_token_of_128_halves(name: str, cycles: int) -> None:
    assert round(CHIPS[name].budget(KV_BYTES)) == cycles


def test_the_share_is_one_up_to_the_budget_and_falls_with_the_cycles_beyond() -> None:
    chip = CHIPS["M2 Max"]
    budget = chip.budget(KV_BYTES)
    assert chip.share(KV_BYTES, budget / 3) == 1.0
    assert chip.share(KV_BYTES, 2 * budget) == pytest.approx(0.5)
    assert chip.gigabytes(KV_BYTES, 2 * budget) == pytest.approx(200.0)


def test_memory_that_streams_less_than_published_caps_the_rate() -> None:
    chip = CHIPS["M5 Max"]
    assert chip.gigabytes(KV_BYTES, 1.0, stream=530.0) == 530.0
    assert chip.gigabytes(KV_BYTES, 1.0) == 614.0


def test_every_chip_says_where_its_clock_was_seen() -> None:
    assert len(CHIPS) == 9 and all(chip.clock_from for chip in CHIPS.values())
