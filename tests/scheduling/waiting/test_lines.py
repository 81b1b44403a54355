"""The queue's order, whatever comes and goes."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.waiting.lines import Lines
from support.requests import job_of


@settings(max_examples=30, deadline=None)
@given(data=st.data(), churn=st.booleans())
def test_lines_are_the_sorted_list_of_who_is_in_them(data: st.DataObject, churn: bool) -> None:
    lines, model, gone = Lines(), list[Job](), list[Job]()
    for number in range(data.draw(st.integers(0, 120))):
        if model and data.draw(st.integers(0, 3 if churn else 9)) < 2:
            job = model.pop(data.draw(st.integers(0, len(model) - 1)))
            lines.remove(job)
            gone.append(job)
        elif gone and data.draw(st.booleans()):  # preempted: it is back, as early as before
            lines.add(job := gone.pop())
            model.append(job)
        else:
            client, priority = data.draw(st.sampled_from([None, "a", "b", "c"])), data.draw(st.integers(-2, 2))
            job = job_of(number, [1], client=client, priority=priority)
            lines.add(job)
            model.append(job)
        passed = {job.client for job in model if data.draw(st.booleans())} if data.draw(st.booleans()) else set()
        for client in passed:
            lines.pass_over(client)
        rest = [job for job in model if job.client not in passed]
        assert lines.first is min(rest, key=lambda j: j.order, default=None)
        lines.bring_back()
        assert lines.first is min(model, key=lambda j: j.order, default=None)
        assert len(lines) == len(model) and set(lines) == set(model)
