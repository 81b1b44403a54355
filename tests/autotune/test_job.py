"""Jobs and candidates as data."""

from __future__ import annotations

from support.scripted_choice import Clock, job_of


def test_the_first_candidate_is_the_usual_one_and_a_job_costs_no_run() -> None:
    clock = Clock()
    job = job_of([clock.candidate("rule", 1.0), clock.candidate("other", 0.5)])
    assert job.default_candidate == "rule" and job.candidate_names == {"rule", "other"}
    assert clock.runs == []
