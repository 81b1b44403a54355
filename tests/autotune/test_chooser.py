"""The fastest candidate serves, and is known the next time."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cortexmlx.autotune.chooser import MARGIN, SECONDS, Autotuner, pick_candidate
from cortexmlx.autotune.job import CannotServe
from cortexmlx.autotune.table import ChoiceTable, TimingIdentity
from cortexmlx.autotune.timing import ROUNDS, Timing
from cortexmlx.stats import ChoiceSource
from support.scripted_choice import Clock, job_of

HERE = TimingIdentity("a GPU", "15.1", "0.32.4", "0123", "0.1.0")


def test_the_fastest_serves_and_why_is_told() -> None:
    clock = Clock()
    chooser = Autotuner(None, clock)
    no = clock.candidate("no", 0.001, error=CannotServe("it spills"))
    chooser.choose([job_of([clock.candidate("rule", 1 / 64), clock.candidate("other", 1 / 128), no])])
    assert chooser.chosen_candidate("a job") == "other" and chooser.chosen_candidate("another") is None
    [choice] = chooser.choices()
    assert (choice.job, choice.batch, choice.chosen) == ("the label of a job", "every batch", "other")
    assert choice.source is ChoiceSource.TIMED
    assert choice.seconds == {"rule": 1 / 64, "other": 1 / 128} and choice.refused == {"no": "it spills"}


def test_the_usual_candidate_serves_unless_another_is_clearly_faster() -> None:
    nearly, clearly = 1.0 / (1 + MARGIN) + 0.001, 1.0 / (1 + MARGIN) - 0.001
    assert pick_candidate(Timing({"other": nearly, "rule": 1.0}, {}), "rule") == "rule"
    assert pick_candidate(Timing({"other": clearly, "rule": 1.0}, {}), "rule") == "other"
    assert pick_candidate(Timing({"other": 5.0}, {"rule": "it spills"}), "rule") == "other"
    assert pick_candidate(Timing({}, {"rule": "it spills"}), "rule") == "rule"


def test_the_next_engine_times_nothing(tmp_path: Path) -> None:
    clock = Clock()
    jobs = [job_of([clock.candidate("rule", 1 / 64), clock.candidate("other", 1 / 128)])]
    Autotuner(ChoiceTable(HERE, tmp_path), clock).choose(jobs)
    timed = len(clock.runs)
    later = Autotuner(ChoiceTable(HERE, tmp_path), clock)
    later.choose(jobs)
    assert len(clock.runs) == timed == 2 * (ROUNDS + 1)
    [choice] = later.choices()
    assert choice.chosen == "other" and choice.source is ChoiceSource.DISK and choice.seconds["rule"] == 1 / 64


def test_all_is_timed_again_when_a_digest_changes_or_if_asked(tmp_path: Path) -> None:
    clock = Clock()
    jobs = [job_of([clock.candidate("rule", 1 / 64), clock.candidate("other", 1 / 128)])]
    Autotuner(ChoiceTable(HERE, tmp_path), clock).choose(jobs)
    for table, again in (
        (ChoiceTable(replace(HERE, texts="4567"), tmp_path), False),
        (ChoiceTable(HERE, tmp_path), True),
    ):
        before = len(clock.runs)
        chooser = Autotuner(table, clock)
        chooser.choose(jobs, ignore_table=again)
        assert len(clock.runs) - before == 2 * (ROUNDS + 1)
        assert chooser.choices()[0].source is ChoiceSource.TIMED


def test_a_job_with_other_candidates_than_before_is_timed_again(tmp_path: Path) -> None:
    clock = Clock()
    rule, other, new = (clock.candidate(name, 1 / 128) for name in ("rule", "other", "new"))
    for candidates in ([rule, other], [rule, other, new], [rule, new]):
        chooser = Autotuner(ChoiceTable(HERE, tmp_path), clock)
        chooser.choose([job_of(candidates)])
        assert chooser.choices()[0].source is ChoiceSource.TIMED


def test_a_job_that_nobody_can_serve_keeps_its_rule_and_is_tried_again(tmp_path: Path) -> None:
    clock = Clock()
    for tried in (2, 4):
        bad = [clock.candidate(name, 0.1, error=MemoryError("no room")) for name in ("rule", "other")]
        chooser = Autotuner(ChoiceTable(HERE, tmp_path), clock)
        chooser.choose([job_of(bad)])
        [choice] = chooser.choices()
        assert choice.chosen == "rule" and choice.source is ChoiceSource.RULE
        assert choice.refused == {"rule": "MemoryError: no room", "other": "MemoryError: no room"}
        assert len(clock.runs) == tried


@pytest.mark.parametrize("refusal", [MemoryError("no room"), RuntimeError("[metal::malloc] Attempting to allocate")])
def test_a_candidate_that_memory_was_refused_to_is_timed_again(refusal: Exception, tmp_path: Path) -> None:
    clock = Clock()
    usual = clock.candidate("rule", 1 / 64)
    for other, chosen in ((clock.candidate("other", 0.1, error=refusal), "rule"), (None, "other")):
        chooser = Autotuner(ChoiceTable(HERE, tmp_path), clock)
        chooser.choose([job_of([usual, other or clock.candidate("other", 1 / 128)])])
        assert chooser.chosen_candidate("a job") == chosen


def test_what_was_timed_is_kept_when_an_interrupt_comes(tmp_path: Path) -> None:
    clock = Clock()
    good = job_of([clock.candidate("rule", 1 / 64), clock.candidate("other", 1 / 128)])
    bad = job_of([clock.candidate(n, 0.1, error=KeyboardInterrupt()) for n in "ab"], "bad")  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        Autotuner(ChoiceTable(HERE, tmp_path), clock).choose([good, bad])
    assert list(ChoiceTable(HERE, tmp_path).read()) == ["a job"]


def test_an_opening_is_delayed_by_a_second_and_a_half_at_most_and_the_next_goes_on(tmp_path: Path) -> None:
    """Jobs without a time keep their rule, say so, and are timed at the next openings."""
    clock = Clock()
    jobs = [
        job_of([clock.candidate("rule", 0.04, first=0.06), clock.candidate("other", 0.03, first=0.06)], f"job {number}")
        for number in range(10)
    ]
    untimed = []
    for _ in range(4):
        before = clock.now
        chooser = Autotuner(ChoiceTable(HERE, tmp_path), clock)
        chooser.choose(jobs)
        assert clock.now - before <= SECONDS
        untimed.append(sum(choice.source is ChoiceSource.RULE for choice in chooser.choices()))
        assert all((c.chosen == "rule") == (c.source is ChoiceSource.RULE) for c in chooser.choices())
    assert untimed == sorted(untimed, reverse=True) and untimed[0] > untimed[1] > untimed[-1] == 0


def test_nothing_is_timed_while_somebody_waits(tmp_path: Path) -> None:
    clock = Clock()
    jobs = [
        job_of([clock.candidate("rule", 1 / 64), clock.candidate("other", 1 / 128)], str(number)) for number in range(3)
    ]
    chooser = Autotuner(ChoiceTable(HERE, tmp_path), clock)
    chooser.choose(jobs, has_waiting=lambda: len(clock.runs) >= 15)
    assert len(clock.runs) == 15
    assert [choice.source.value for choice in chooser.choices()] == ["timed", "rule", "rule"]


class Openings(RuleBasedStateMachine):
    """Engines that open one after the other, on a machine whose file is damaged and whose kernels change: what serves
    is always the fastest of what is there now, by the true times.
    """

    TIMES: ClassVar = {"rule": 1 / 256, "fast": 1 / 512, "slow": 1 / 128}

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.digest = 0
        self.known: set[tuple[int, str]] = set()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @property
    def table(self) -> ChoiceTable:
        return ChoiceTable(replace(HERE, texts=str(self.digest)), Path(self.folder.name))

    @rule(keys=st.sets(st.sampled_from("xyz"), min_size=1))
    def open(self, keys: set[str]) -> None:
        jobs = [job_of([self.clock.candidate(n, s) for n, s in self.TIMES.items()], key) for key in sorted(keys)]
        chooser, before = Autotuner(self.table, self.clock), len(self.clock.runs)
        chooser.choose(jobs)
        new = [key for key in keys if (self.digest, key) not in self.known]
        runs = 2 * (ROUNDS + 1) + 2  # the slow one is hopeless
        assert len(self.clock.runs) - before == runs * len(new)
        assert {chooser.chosen_candidate(key) for key in keys} == {"fast"}
        assert all((c.source is ChoiceSource.DISK) == (c.job[-1] not in new) for c in chooser.choices())
        self.known |= {(self.digest, key) for key in keys}

    @rule()
    def change_a_kernel(self) -> None:
        self.digest += 1

    @rule()
    def change_back(self) -> None:
        self.digest = max(0, self.digest - 1)

    @rule(content=st.binary(max_size=50))
    def damage(self, content: bytes) -> None:
        self.table.path.write_bytes(content)
        self.known = {(digest, key) for digest, key in self.known if digest != self.digest}

    @rule()
    def remove(self) -> None:
        self.table.path.unlink(missing_ok=True)
        self.known = {(digest, key) for digest, key in self.known if digest != self.digest}

    @invariant()
    def no_file_is_left_unfinished(self) -> None:
        if hasattr(self, "folder"):
            assert all(path.suffix == ".json" for path in Path(self.folder.name).iterdir())


OpeningsTest = Openings.TestCase
OpeningsTest.settings = settings(max_examples=25, stateful_step_count=20)
