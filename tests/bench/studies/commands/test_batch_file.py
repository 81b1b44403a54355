"""What a batch file costs beside its engine: both sides answer the same requests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cortexmlx.bench.studies.commands.batch_file import alone, compare, rate, write_requests


def test_the_engine_alone_answers_every_request_whole(model: str, tmp_path: Path) -> None:
    write_requests(tmp_path / "in", 5, 7)
    tokens, seconds = alone(model, tmp_path / "in")
    assert tokens == 35 and seconds > 0


def test_a_rate_is_what_a_command_says_and_its_failure_is_told() -> None:
    said = "import sys; print('cortexmlx: 5 answered, 0 failed, 35 tokens in 1.2 s, 29.2 tok/s', file=sys.stderr)"
    told = rate([sys.executable, "-c", said])
    assert (told.tokens, told.wall) == (35, 29.2) and 35 / 60 < told.cpu < 35 / 0.001
    with pytest.raises(RuntimeError, match="ended with 3: no model"):
        rate([sys.executable, "-c", "import sys; sys.stderr.write('no model'); sys.exit(3)"])


@pytest.mark.slow
def test_both_sides_run_in_pairs(model: str) -> None:
    pairs = compare(model, 2, 6, 5)
    assert len(pairs) == 2 and all(file.tokens == engine.tokens == 30 for file, engine in pairs)
