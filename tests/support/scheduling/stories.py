"""What requests must compute, whatever the schedule: their tokens, and a number for each position."""

from __future__ import annotations

from dataclasses import dataclass, field

from cortexmlx.scheduling.job import Job

_MIX = 2**61 - 1


def number_after(before: int | None, token: int) -> int:
    """The number of a position: that of the one before, and its token."""
    return ((12345 if before is None else before) * 1_000_003 + token * 7919 + 1) % _MIX or 1


@dataclass
class Story:
    """What a request must compute: its tokens for as long as anybody asks, and the number of each position."""

    job: Job
    vocab: int
    tokens: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for token in self.job.tokens:
            self._add(token)

    def _add(self, token: int) -> None:
        self.tokens.append(token)
        self.numbers.append(number_after(self.numbers[-1] if self.numbers else None, token))

    def up_to(self, length: int) -> None:
        while len(self.tokens) < length:
            self._add((self.numbers[-1] + self.job.seed) // 97 % self.vocab)

    def token(self, position: int) -> int:
        self.up_to(position + 1)
        return self.tokens[position]

    def number(self, position: int) -> int:
        self.up_to(position + 1)
        return self.numbers[position]

    def answer(self) -> list[int]:
        """The tokens of the whole answer."""
        self.up_to(self.job.prompt_length + self.job.max_new_tokens)
        answer = self.tokens[self.job.prompt_length :][: self.job.max_new_tokens]
        stops = [i for i, t in enumerate(answer) if t in self.job.stop_ids]
        return answer[: stops[0] + 1] if stops else answer


@dataclass
class KeptStory(Story):
    """The same of a request that keeps the `first` tokens and the `last` newest. It is one text after the other, each
    begun with what is left of the one before: `tokens` and `numbers` are those of the text that the job has now.
    """

    first: int = 0
    last: int = 1

    def __post_init__(self) -> None:
        self._texts: list[tuple[list[int], list[int]]] = []
        self._told: list[int] = []
        self._begin(list(self.job.request.prompt))

    def _begin(self, text: list[int]) -> None:
        self.tokens, self.numbers = [], []
        self._texts.append((self.tokens, self.numbers))
        for token in text:
            self._add(token)

    def _tell(self) -> None:
        """One more token of the answer."""
        while len(text := self._texts[-1][0]) > self.first + self.last + self.last:
            self._begin(text[: self.first] + text[self.first + self.last :])
        self.tokens, self.numbers = self._texts[-1]
        super().up_to(len(self.tokens) + 1)
        self._told.append(self.tokens[-1])

    def up_to(self, length: int) -> None:
        texts = len(self.job.dropped_tokens) // self.last + 1
        while len(self._texts) < texts or len(self._texts[texts - 1][0]) < length:
            assert len(self._texts) <= texts, f"job {self.job.id} goes on with what it should have dropped"
            self._tell()
        self.tokens, self.numbers = self._texts[texts - 1]

    def answer(self) -> list[int]:
        """The tokens of the answer as far as it goes, and one more."""
        wanted = min(self.job.max_new_tokens, self.job.num_generated + 1)
        while len(self._told) < wanted:
            self._tell()
        answer = self._told[:wanted]
        stops = [i for i, t in enumerate(answer) if t in self.job.stop_ids]
        return answer[: stops[0] + 1] if stops else answer
