"""The order of those that wait, whatever comes and goes."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from cortexmlx.scheduling.fair_share import ClientQueues, FairShare
from cortexmlx.scheduling.job import Job
from support.effort import examples
from support.scheduling.requests import job_of


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data(), churn=st.booleans())
def test_lines_are_the_sorted_list_of_who_is_in_them(data: st.DataObject, churn: bool) -> None:
    """By what their clients have had, and by priority and age among those of one."""
    turns, model, gone = FairShare(), list[Job](), list[Job]()
    lines = ClientQueues(turns)

    def first(jobs: list[Job]) -> Job | None:
        return min(jobs, key=lambda j: (turns.place(j.client), j.order), default=None)

    for number in range(data.draw(st.integers(0, 120))):
        if model and data.draw(st.integers(0, 3 if churn else 9)) < 2:
            job = model.pop(data.draw(st.integers(0, len(model) - 1)))
            lines.remove(job)
            turns.begin(job)
            lines.reorder_client(job.client)
            gone.append(job)
        elif gone and data.draw(st.booleans()):  # preempted: it is back, as early as before
            job = gone.pop()
            job.generation += 1
            turns.arrive(job)
            lines.reorder_client(job.client)
            lines.add(job)
            model.append(job)
        else:
            client, priority = data.draw(st.sampled_from([None, "a", "b", "c"])), data.draw(st.integers(-2, 2))
            prompt = [1] * data.draw(st.integers(1, 99))
            job = job_of(number, prompt, client=client, priority=priority)
            turns.arrive(job)
            lines.add(job)
            model.append(job)
        passed = {job.client for job in model if data.draw(st.booleans())} if data.draw(st.booleans()) else set()
        for client in passed:
            lines.pass_over(client)
        assert lines.first is first([job for job in model if job.client not in passed])
        lines.bring_back()
        assert lines.first is first(model)
        assert len(lines) == len(model) and set(lines) == set(model)
