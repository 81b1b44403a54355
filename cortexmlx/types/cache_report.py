"""CacheReport: how much of a prompt was found in the prefix cache, and why the rest was computed again."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class RecomputeReason(StrEnum):
    """Why tokens that were known were computed again. The values are labels of `/metrics`."""

    TEXT = "text"
    TOOLS = "tools"
    TOOL_ORDER = "tool_order"
    VARIABLES = "template_variables"
    CUT = "cut"
    THOUGHTS = "thoughts"
    EVICTED = "evicted"
    STATE = "state"
    ADAPTER = "adapter"
    MODEL = "model"
    CACHE_OFF = "cache_off"
    SCORES = "prompt_logprobs"


_WORDS = {
    RecomputeReason.TOOLS: "other tools",
    RecomputeReason.TOOL_ORDER: "the tools came in another order",
    RecomputeReason.VARIABLES: "other template variables",
    RecomputeReason.THOUGHTS: "the chat template leaves out earlier thoughts",
    RecomputeReason.EVICTED: "it is no longer in memory, and was not read from disk",
    RecomputeReason.STATE: "the model can begin only where its layers' states or windows were kept",
    RecomputeReason.ADAPTER: "it was known with another adapter",
    RecomputeReason.MODEL: "another model has read it",
    RecomputeReason.CACHE_OFF: "the request was kept out of the cache",
    RecomputeReason.SCORES: "the log-probabilities of the prompt were asked for",
}
"""What each means; of TEXT and CUT, the place and the two texts say it."""


@dataclass(frozen=True)
class CacheReport:
    """How much of one prompt was found in the cache, and why tokens of the same client's earlier prompts were computed
    again. Its `str` is a sentence. It holds pieces of the prompt's text: never log it.
    """

    prompt_tokens: int
    memory_tokens: int = 0
    """Tokens that were found in memory."""
    disk_tokens: int = 0
    """Tokens that were read from disk."""
    known_tokens: int = 0
    """The longest beginning that this prompt shares with one that is remembered of this client."""
    recomputed_tokens: int = 0
    """Tokens that were computed again: of that beginning, and after it those in runs of 16 or more that the earlier
    prompt has, too. 0 if they are fewer than 32.
    """
    reason: RecomputeReason | None = None
    """Why; None: nothing was computed again."""
    message: int | None = None
    """The number of the message in which the texts differ, from 1; None: in none, or that cannot be told."""
    role: str = ""
    """The role of that message."""
    character: int | None = None
    """The first different character, from 0: in the text of the message, or else of the prompt."""
    old: str = field(default="", repr=False)
    """The earlier prompt's text around the difference, up to 60 characters."""
    new: str = field(default="", repr=False)
    """The text that this prompt has there."""
    detail: str = field(default="", repr=False)
    """More about it, such as the names of new tools."""
    model: str = ""
    """The model's name."""
    time: float = 0.0
    """When the answer ended, in seconds since 1970."""

    def __str__(self) -> str:
        if self.reason is None:
            found = self.memory_tokens + self.disk_tokens
            disk = f", {self.disk_tokens:,} of them on disk" if self.disk_tokens else ""
            rest = self.prompt_tokens - found
            new = f"; the other {rest:,} are new text" if rest >= 32 else ""
            return f"{found:,} of {self.prompt_tokens:,} tokens were found{disk}{new}"
        words = [_WORDS[self.reason]] if self.reason in _WORDS else []
        place = self._describe_place()
        if self.reason is RecomputeReason.CUT:
            place = f"messages before message {self.message} ({self.role}) are gone"
        if self.old or self.new:
            change = f"`{self.old}` became `{self.new}`"
            words.append(f"{place}: {change}" if place else change)
        elif place:
            words.append(place)
        if self.detail:
            words.append(self.detail)
        return f"{', '.join(words)}; {self.recomputed_tokens:,} tokens computed again"

    def _describe_place(self) -> str:
        """Return where the prompts differ, in words; empty if that cannot be told."""
        at = [] if self.character is None else [f"character {self.character:,}"]
        if self.message is None:
            return "".join(at) and f"{at[0]} of the prompt"
        name = "system message" if (self.message, self.role) == (1, "system") else f"message {self.message:,}"
        return ", ".join([name if name.startswith("system") else f"{name} ({self.role})", *at])
