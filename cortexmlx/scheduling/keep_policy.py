"""Selective KV: a row keeps the first tokens of its text and the newest ones, and drops those between. Without mlx.

The kept text is a text like any other: it is computed again from position 0, as if it had been the prompt. So positions
count the kept tokens, as in StreamingLLM (Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
2023, section 3.2), and never exceed the model's range. No kept key or value has seen a dropped token. (llama.cpp's
context shift rotates the kept keys in place, and computes nothing. But then a token depends on all texts that its row
ever had: after a preemption all of them would have to be computed again, and no other row could share it.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from cortexmlx.errors import InvalidRequest

T = TypeVar("T")

DEFAULT_KEEP_FIRST = 4
"""How many first tokens are kept by default. Models give them attention that is not meant for anything else, and four
are enough (Xiao et al.).
"""


@dataclass(frozen=True)
class KeepPolicy:
    """Which tokens of a long text a row keeps: the `first` ones and at least the `last` newest ones. When the row has
    `max_row_tokens` tokens, `last` of those between are dropped.

    What is dropped depends on the length of the text alone, not on where its prompt ended, nor on memory or other rows.
    """

    first: int
    last: int

    @property
    def max_row_tokens(self) -> int:
        """The most tokens that a row computes before it must drop some."""
        return self.first + 2 * self.last

    def count_surplus(self, tokens: int) -> int:
        """Return how many of `tokens` tokens of a text are dropped: the oldest after `first`, a multiple of `last`."""
        return max(0, -(-(tokens - self.max_row_tokens) // self.last)) * self.last

    def remove_surplus(self, text: list[T]) -> list[T]:
        """Remove the surplus tokens from a text, and return them."""
        surplus_slice = slice(self.first, self.first + self.count_surplus(len(text)))
        removed_tokens = text[surplus_slice]
        del text[surplus_slice]
        return removed_tokens

    def check(self, context: int, capacity: int) -> None:
        """Raise InvalidRequest if a row could outgrow the model's `context`, or a cache of `capacity` tokens."""
        for max_tokens, limit_phrase, other_advice in (
            (context, "the model's context has", ""),
            (capacity, "the KV cache holds", ", or raise the KV memory (--kv-memory)"),
        ):
            if self.max_row_tokens > max_tokens:
                max_keep_last = (max_tokens - self.first) // 2
                smaller_setting = f"keep_last at most {max_keep_last}" if max_keep_last > 0 else "keep_first smaller"
                raise InvalidRequest(
                    f"keep_first is {self.first} and keep_last {self.last}: a row has {self.max_row_tokens} tokens "
                    f"(keep_first + 2 x keep_last) when it drops some, and {limit_phrase} {max_tokens}: make "
                    f"{smaller_setting}{other_advice}"
                )
