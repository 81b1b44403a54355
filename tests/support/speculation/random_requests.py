"""Requests drawn at random, with everything that can be asked of an answer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from cortexmlx.core.handle import RequestHandle
from cortexmlx.structured.calls.format import AllowedCalls
from cortexmlx.structured.calls.json_formats import Hermes
from cortexmlx.structured.output import StructuredOutput, Thoughts
from cortexmlx.structured.tools import Tool
from cortexmlx.types.sampling_params import SamplingParams
from support.engine.core_driver import Driver
from support.models.tiny import VOCAB, tokens_of

THOUGHTS = Thoughts("<think>", "</think>", opened_by_prompt=True)
FORMS: tuple[Any, ...] = (
    {
        "x-guidance": {"whitespace_flexible": False},
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 4},
            "kind": {"enum": ["cat", "dog", "horse"]},
            "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["name", "kind", "list"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": [1, 22, "four", None]}, "minItems": 2, "maxItems": 4},
    StructuredOutput.regex("[ab]{2,20}-?"),
    StructuredOutput.choice(["red", "green", "greenish blue"]),
)
CALLS = AllowedCalls(
    Hermes(),
    (
        Tool(
            "look",
            parameters='{"type": "object", "properties": {"at": {"enum": ["sun", "moon"]}}, "required": ["at"]}',
        ),
        Tool("wait"),
    ),
    "required",
    parallel=False,
)
MAX_PROMPT, MAX_ANSWER = 44, 40


@dataclass
class Asked:
    """One request."""

    prompt: list[int]
    seed: int
    max_tokens: int
    client: str | None = None
    cache: bool = True
    params: dict[str, Any] = field(default_factory=dict)
    thoughts: Thoughts | None = None
    calls: AllowedCalls | None = None
    arrives: int = 0
    """The step before which it is asked."""
    cancelled: int | None = None
    """The step before which it is cancelled."""

    @property
    def answers(self) -> int:
        """How many answers are computed."""
        return self.params.get("best_of") or self.params.get("n", 1)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, **self.params)

    @property
    def chosen_later(self) -> bool:
        """Whether only the likeliest answers are kept."""
        return self.params.get("best_of") is not None

    @property
    def constrained(self) -> bool:
        """Whether a grammar says which tokens may come."""
        return self.calls is not None or self.params.get("structured") is not None

    @property
    def wishes(self) -> list[str]:
        """What is asked, in words."""
        cancelled = ["cancelled"] if self.cancelled is not None else []
        return [*(name for name in self.params if name not in ("tool_choice", "parallel_tool_calls")), *cancelled]

    def add(self, driver: Driver, every: bool = False, adapter: str | None = None) -> RequestHandle:
        """Ask it, perhaps with an adapter. With `every`, no answer is left out."""
        changes = {"n": self.params["best_of"], "best_of": None} if every and self.chosen_later else {}
        return driver.add(
            self.prompt,
            self.max_tokens,
            self.seed,
            self.client,
            self.cache,
            thoughts=self.thoughts,
            calls=self.calls,
            adapter=adapter,
            **self.params | changes,
        )


def random_request(dice: random.Random, only_greedy: bool = False, keeps: bool = False) -> Asked:
    """One request, greedy or seeded. With `only_greedy`, its tokens are the likeliest ones, and nothing changes logits
    or restricts them. `keeps`: its text may lose tokens.
    """
    asked = Asked(_prompt(dice), dice.randrange(2**40), dice.randint(1, MAX_ANSWER))
    asked.client, asked.cache = dice.choice([None, None, "a", "b"]), dice.random() > 0.1
    asked.arrives = dice.choice([0, 0, dice.randint(0, 40)])
    asked.cancelled = asked.arrives + dice.randint(1, 30) if dice.random() < 0.06 else None
    params = asked.params
    params["ignore_eos"] = dice.random() < 0.7
    if dice.random() < 0.3:
        params["logprobs"] = dice.choice([0, 1, 3])
    if dice.random() < 0.15:
        params["n"] = dice.randint(2, 3)
        if dice.random() < 0.3:
            params["best_of"] = params["n"] + 1
    if dice.random() < 0.2:
        params["stop"] = tuple(dice.sample(["a", "e", "th", "the", "é", "q1", "ZZ", "x", "}", '"kind"'], 4))
    if dice.random() < 0.2:
        params["stop_token_ids"] = tuple(dice.sample(range(VOCAB), 8))
    if dice.random() < 0.06 and not keeps:  # of a whole text only
        params["prompt_logprobs"] = dice.choice([0, 2])
    if only_greedy:
        return asked
    if dice.random() < 0.5:
        params["temperature"] = dice.choice([0.5, 0.8, 1.0, 1.5])
        if dice.random() < 0.4:
            params["top_p"] = dice.choice([0.3, 0.8, 0.95])
        if dice.random() < 0.3:
            params["top_k"] = dice.choice([1, 2, 20])
        if dice.random() < 0.3:
            params["min_p"] = dice.choice([0.02, 0.2])
    if dice.random() < 0.3:
        params["repetition_penalty"], params["repetition_context"] = dice.choice([0.8, 1.3]), dice.choice([2, 20])
    if dice.random() < 0.3:
        params["presence_penalty"], params["frequency_penalty"] = dice.choice([0.0, 1.0]), dice.choice([-0.5, 0.3])
    if dice.random() < 0.3:  # few tokens, so that an answer repeats itself
        params["logit_bias"] = {token: dice.choice([4.0, 9.0]) for token in dice.sample(range(97, 123), 4)}
    form = dice.random()
    if form < 0.2:
        params["structured"] = dice.choice(FORMS)
    elif form < 0.25:
        asked.calls = CALLS
        params["tools"] = CALLS.tools
        params["tool_choice"], params["parallel_tool_calls"] = "required", False
    if form < 0.25:
        params["ignore_eos"] = False
    if dice.random() < 0.12:
        asked.thoughts, params["max_thinking_tokens"] = THOUGHTS, dice.choice([0, 1, 2, 5, 12])
    return asked


def _prompt(dice: random.Random) -> list[int]:
    """Prompts begin like each other, and repeat themselves."""
    theme = tokens_of(40, seed=dice.randint(0, 2))
    rest = [dice.randrange(256) for _ in range(dice.randint(1, 20))]
    again = rest * dice.choice([1, 1, 3])
    return [*theme[: dice.choice([0, 0, 9, 24])], *again][:MAX_PROMPT]
