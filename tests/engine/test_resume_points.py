"""What a request of an agent computes again: its new tokens, what the template changed, and two blocks at most."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.core.prompt import count_thinking_tag_tokens
from cortexmlx.sessions.turn import Transcript, find_anchor
from cortexmlx.types.request import QueuedRequest
from support.agents.templates import GLM, GPT_OSS, MISTRAL, QWEN3, TEMPLATES, Message, Template
from support.engine.core_driver import Driver
from support.models.tiny import CONFIGS, write_tiny

BLOCK = 16
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("one layer", {}),
    "window": ("gpt_oss", {"sliding_window": 64}),
    "wide window": ("gemma3_text", {"sliding_window": 200}),
    "chunk": ("llama4", {"text_config": CONFIGS["llama4"]["text_config"] | {"attention_chunk_size": 512}}),
    "hybrid": ("lfm2", {}),
    "recurrent": ("mamba", {}),
}
"""For each kind of model a tiny one: its name, and changes to its configuration."""

_LONG = {"max_position_embeddings": 1 << 16}


def model_of(kind: str, root: Path) -> Path:
    """The folder of a kind's model, written if it is not there."""
    name, changes = KINDS[kind]
    folder = root / kind.replace(" ", "-")
    long = {"text_config": changes["text_config"] | _LONG} if "text_config" in changes else _LONG
    return folder if folder.exists() else write_tiny(folder, name, **(changes | long))


@dataclass(frozen=True)
class Counted:
    """What one request computed."""

    new: int
    """Tokens after the text of the request before."""
    changed: int
    """Tokens of that text that the template has changed, or that come after a change."""
    again: int
    """Tokens that were computed although a cached text begins with them."""


@dataclass
class Agent:
    """One conversation with a model. `history` are the messages so far; they may be changed."""

    driver: Driver
    template: Template
    tools: list[Message]
    history: list[Message]
    seed: int = 0
    counts: list[Counted] = field(default_factory=list)
    texts: list[Any] = field(default_factory=list)
    """The texts that were computed, `[tokens]` each."""
    transcript: Transcript = field(default_factory=Transcript)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def ask(self, said: Message) -> Counted:
        """Ask with the history, have the model say `said`, and count."""
        template = self.template
        render = partial(template.render, tools=self.tools)
        rendered = render(self.history)
        self.transcript = self.transcript.with_prompt(rendered, template.encode)
        prompt, written = list(self.transcript.tokens), template.written(said)
        answer, thoughts = template.encode(written), template.thoughts
        tail = count_thinking_tag_tokens(template, rendered, prompt, thoughts)  # type: ignore[arg-type]
        anchor = find_anchor(self.transcript, self.history, thoughts, render, template.encode)
        cached = self._computed(prompt, answer, tail, anchor)
        text = np.array([*prompt, *answer[:-1]])
        found = max((_common(text[: len(prompt) - 1], other) for other in self.texts), default=0)
        last = self.texts[-1] if self.texts else text[:0]
        common = _common(text[: len(prompt)], last)
        self.counts.append(Counted(len(prompt) - common, len(last) - common, found - cached))
        self.texts.append(text)
        self.transcript = self.transcript.with_answer(written, answer)
        self.history.append(said)
        return self.counts[-1]

    def _computed(self, prompt: list[int], answer: Sequence[int], tail: int, anchor: int) -> int:
        handle = self.driver.add(
            prompt, len(answer), tail=tail, anchor=anchor, logits_processors=[_saying(prompt, answer)]
        )
        self.driver.finish()
        done = self.driver.result(handle)
        assert list(done.token_ids) == list(answer)
        return done.usage.cached_tokens

    def turn(self, calls: int, reminders: int = 0) -> None:
        """A user's message, a loop of calls with thoughts, and the answer. There is a reminder after every `reminders`
        calls.
        """
        self.history.append({"role": "user", "content": self.words(5)})
        for number in range(1, calls + 1):
            call = {"name": "read", "arguments": {"path": self.words(1)}}
            self.ask({"role": "assistant", "content": "", "thought": self.words(3), "call": call})
            self.history.append({"role": "tool", "name": "read", "content": self.words(4)})
            if reminders and number % reminders == 0:
                self.history.append({"role": "user", "content": f"<system-reminder>{self.words(2)}</system-reminder>"})
        self.ask({"role": "assistant", "content": self.words(3), "thought": self.words(3)})

    def words(self, count: int) -> str:
        """Some random words."""
        return " ".join(f"{self.random.randrange(16**6):06x}" for _ in range(count))


def agent_of(driver: Driver, template: Template, system: int, seed: int = 0) -> Agent:
    """A conversation whose system prompt and tools have some `system` tokens, most of them tools."""
    agent = Agent(driver, template, [], [], seed)
    agent.history.append({"role": "system", "content": agent.words(system // 40)})
    agent.tools += [tool(agent.words(8), number) for number in range(system // 130)]
    return agent


def tool(words: str, number: int) -> Message:
    """A tool, of some 110 characters."""
    return {"type": "function", "function": {"name": f"tool_{number}", "description": words}}


def driver_of(model: Path, **config: Any) -> Driver:
    """An engine's core with room for two long conversations."""
    settings = {"tokens": 24_000, "snapshots": 400, "block_size": BLOCK, "max_rows": 2, "prefill_budget": 512}
    return AnchoredDriver(model, **(settings | config))


class AnchoredDriver(Driver):
    """A `Driver` that is told where the next turn parts from a prompt."""

    def add(self, prompt: Sequence[int], *args: Any, tail: int = 0, anchor: int = 0, **params: Any) -> Any:
        add = self.core.add

        def anchored(request: QueuedRequest, *rest: Any) -> None:
            add(replace(request, thinking_tag_length=tail, anchor_length=anchor), *rest)

        self.core.add = anchored  # type: ignore[method-assign]
        try:
            return super().add(prompt, *args, **params)
        finally:
            del self.core.add


def recorded(agent: Agent, turns: int, loop: int, foreign: int) -> Iterator[Counted]:
    """Have a conversation of so many turns, and yield what each request computed. One turn has a `loop` of calls, with
    a reminder after every ten. Foreign prompts of `foreign` tokens come between turns.
    """
    for number in range(turns):
        seen = len(agent.counts)
        agent.turn(loop if number == turns // 4 else number % 4, 10)
        if number % 4 == 1 or number == turns // 4:
            foreigner = Agent(agent.driver, agent.template, [], [], number + 100)
            agent.driver.add(agent.template.encode(foreigner.words(foreign // 7)), 4)
            agent.driver.finish()
        yield from agent.counts[seen:]


def _saying(prompt: Sequence[int], answer: Sequence[int]) -> Callable[[Any, Any], Any]:
    import mlx.core as mx

    def say(tokens: mx.array, logits: mx.array) -> mx.array:
        token = answer[min(tokens.size - len(prompt), len(answer) - 1)]
        return mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -mx.inf)[None]

    return say


def _common(one: Any, other: Any) -> int:
    length = min(len(one), len(other))
    parted = np.flatnonzero(one[:length] != other[:length])
    return int(parted[0]) if len(parted) else length


FEW = [("window", QWEN3), ("window", GPT_OSS), ("hybrid", GPT_OSS)]
"""Those that need the most care."""
CASES = [*product(KINDS, TEMPLATES)] if "TRIALS" in os.environ else FEW


@pytest.mark.parametrize("kind", ["hybrid", pytest.param("window", marks=pytest.mark.slow)])
def test_a_loop_of_calls_and_a_foreign_prompt_cost_a_conversation_nothing(kind: str, tmp_path: Path) -> None:
    driver = driver_of(model_of(kind, tmp_path), tokens=1300, snapshots=6, max_rows=1, prefill_budget=256)
    agent = agent_of(driver, GLM, 250)
    assert max(counted.again for counted in recorded(agent, 2, 8, 500)) <= 2 * BLOCK
    driver.core.check_invariants()


def test_tools_that_move_with_each_question_cost_what_comes_after_them(tmp_path: Path) -> None:
    agent = agent_of(driver_of(model_of("hybrid", tmp_path)), MISTRAL, 130)
    agent.turn(0)
    agent.turn(4, 2)
    agent.turn(1)
    agent.turn(0)
    assert max(counted.again for counted in agent.counts) <= 2 * BLOCK


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "template"), CASES, ids=lambda value: getattr(value, "name", value))
def test_twenty_turns_compute_what_is_new(kind: str, template: Template, tmp_path: Path) -> None:
    driver = driver_of(model_of(kind, tmp_path))
    counts = list(recorded(agent_of(driver, template, 2500), 20, 60, 3000))
    assert [counted for counted in counts if counted.again > 2 * BLOCK] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_more_tool_computes_at_most_four_times_what_comes_after_it(kind: str, tmp_path: Path) -> None:
    driver = driver_of(model_of(kind, tmp_path))
    agent = agent_of(driver, QWEN3, 5000)
    agent.turn(0)
    agent.tools.append(tool(agent.words(8), 99))
    agent.turn(0)
    assert agent.counts[-1].again <= 3 * (agent.counts[-1].changed + 4 * 256)
