"""The same answers with speculation as without, whatever drafts, and whatever happens to an answer on the way.

`TRIALS=130 make test-slow ARGS=tests/engine/test_speculation.py` runs more of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.effort import examples, trial_seeds
from support.speculation.counts import Counts
from support.speculation.kinds import NAMES, Kind, kinds
from support.speculation.trial import Trial


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kind]:
    return kinds(tmp_path_factory.mktemp("kinds"))


def trials(kind: Kind, store: Path, seeds: range) -> Counts:
    counts = Counts()
    for seed in seeds:
        print("seed", seed)
        Trial(seed, kind, store=store / str(seed)).run(counts)
    print(counts)
    assert counts.accepted > 10 * len(seeds)
    assert counts.logprobs > 10 * len(seeds)
    return counts


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3", "qwen3_5", "4 bits in windows"])
def test_answers_are_those_without_speculation(name: str, kind: Callable[[str], Kind], tmp_path: Path) -> None:
    trials(kind(name), tmp_path, range(examples(3, few=1) if name == "llama" else 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_answers_are_those_without_speculation(name: str, kind: Callable[[str], Kind], tmp_path: Path) -> None:
    counts = trials(kind(name), tmp_path, trial_seeds(40))
    assert counts.preemptions > 5
