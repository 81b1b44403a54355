"""Claims: whether to wait for another's prefix, or not."""

from __future__ import annotations

import pytest

from cortexmlx.kv.prefix import PrefixMatch, PrefixNode
from cortexmlx.scheduling.admission import InFlightPrefixes
from cortexmlx.types.request import RequestState
from support.scheduling.requests import job_of
from support.scheduling.stage import Stage


@pytest.mark.parametrize("worth", [1, 32])
def test_who_has_nothing_to_gain_waits_for_nobody(worth: int) -> None:
    """The last token of a prompt is computed in any case, so a prompt of one block of one token finds nothing."""
    stage = Stage(blocks=40, block_size=1, worth_waiting=worth)
    jobs = [stage.ask([1]), stage.ask([1]), stage.ask([2])]
    stage.steps(1)
    assert [job.is_running for job in jobs] == [True, True, True]
    stage.finish()


def shared_prompts(count: int, shared: int, own: int) -> list[list[int]]:
    return [[*[i % 7 for i in range(shared)], *[i % 9 + 2] * own] for i in range(count)]


def prompt_tokens_computed(stage: Stage) -> list[int]:
    """Prompt tokens of each step, until everything has ended."""
    counts = []
    while not stage.scheduler.is_idle:
        if (plan := stage.shadow.plan()) is not None:
            stories = stage.shadow.stories
            counts.append(sum(s.count for s in plan.segments if s.first < stories[s.job].job.prompt_length))
        if stage.shadow.in_flight:
            stage.shadow.commit()
    return counts


def test_a_long_shared_beginning_is_computed_once() -> None:
    stage = Stage(blocks=400, block_size=32, max_rows=16, prefill_budget=512)
    for prompt in shared_prompts(16, 512, 20):
        stage.ask(prompt, 20)
    assert sum(prompt_tokens_computed(stage)) == 512 + 16 * 20


def test_the_same_prompt_twice_is_computed_once() -> None:
    stage = Stage(blocks=400, block_size=32, prefill_budget=512)
    for prompt in [list(range(10)) * 30] * 2:
        stage.ask(prompt, 20)
    assert sum(prompt_tokens_computed(stage)) == 300 + 300 % 32


@pytest.mark.parametrize(("shared", "steps"), [(24, 1), (31, 1), (32, 2), (48, 2)])
def test_a_beginning_is_waited_for_if_it_saves_as_many_tokens_as_a_step_costs(shared: int, steps: int) -> None:
    stage = Stage(blocks=400, block_size=8, max_rows=8, prefill_budget=1024)
    prompts = shared_prompts(8, shared, 40)
    for prompt in prompts:
        stage.ask(prompt, 2)
    counts = [count for count in prompt_tokens_computed(stage) if count]
    assert len(counts) == steps
    assert sum(counts) == (8 * len(prompts[0]) if steps == 1 else shared + 8 * 40)


def test_who_waits_begins_as_soon_as_the_shared_part_is_stored() -> None:
    """Not only when the other's whole prompt is."""
    stage = Stage(blocks=400, block_size=8, prefill_budget=64)
    long, short = stage.ask([1] * 64 + [2] * 900), stage.ask([1] * 64 + [3] * 9)
    stage.steps(3)
    assert short.is_running and long.state is RequestState.PREFILLING and short.num_computed_tokens >= 64
    stage.finish()


def test_whoever_is_waited_for_keeps_its_state_where_others_begin() -> None:
    """A fork of what is shared, in a model with recurrent layers, takes the state there."""
    claims = InFlightPrefixes(block_size=4, worth_waiting=1)
    owner, other = (job_of(number, [*range(20), *[number] * 5]) for number in (1, 2))
    for job in (owner, other):
        job.keys = [bytes(job.tokens[: 4 * i]) for i in range(1, 7)]
    claims.claim(owner)
    gate = claims.block_to_await(other, PrefixMatch(PrefixNode(b""), (), None, 0))
    assert gate == owner.keys[4]
    claims.keep_state(gate)
    claims.keep_state(b"of nobody")
    assert owner.snapshot_positions == {20} and not other.snapshot_positions
