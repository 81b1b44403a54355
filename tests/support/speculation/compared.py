"""Two engines' answers to one request, compared: the same, or different from a proven tie on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.core.answers import answer_seed
from cortexmlx.core.handle import RequestHandle
from cortexmlx.errors import CortexError
from cortexmlx.execution.boundary import TokenMask
from cortexmlx.execution.sampling import BatchSampler
from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.structured.matcher import fill_masks
from cortexmlx.types.request import Completion, FinishReason
from support.engine.core_driver import Driver
from support.engine.judge import NOISE
from support.models.quantized_models import gap_of
from support.speculation.counts import Counts
from support.speculation.kinds import Kind, judge
from support.speculation.random_requests import Asked

SIZES = (1e-5, 1e-4, NOISE)
_RANDOM = 200


def tie_size(
    model: Any,
    text: Sequence[int],
    row: SamplingRow,
    mask: Any,
    candidates: tuple[int, int],
) -> float | None:
    """The smallest of `SIZES` by which logits must change so that each of two tokens may be chosen after `text`; None
    if `NOISE` does not suffice. `row.output` are the tokens of the answer before, `mask` those that may be chosen.
    """
    logits = np.array(model(mx.array([list(text)]))[0, -1].astype(mx.float32))
    for size in SIZES:
        changed = logits + size * _changes(len(logits), candidates)
        sampler = BatchSampler([row] * len(changed), logits.shape[0])
        allowed = None
        if mask is not None:
            allowed = TokenMask(np.arange(len(changed), dtype=np.int32), np.stack([mask] * len(changed)))
        index = np.full(len(changed), len(row.output), np.int32)
        chosen = set(sampler(mx.array(changed.astype(np.float32)), index, None, allowed).tokens.tolist())
        if chosen >= set(candidates):
            return size
    return None


def _changes(vocab: int, candidates: tuple[int, int]) -> np.ndarray:
    """Changes of logits by at most 1, `[n, vocab]`: for each token, all up to it against all others, and the reverse;
    a candidate against all others; and random ones.
    """
    ids = np.arange(vocab)
    up_to = np.where(ids[None] <= ids[:, None], 1.0, -1.0)
    one = np.where(ids[None] == np.array(candidates)[:, None], 1.0, -1.0)
    luck = np.random.default_rng(0).uniform(-1, 1, (_RANDOM, vocab))
    return np.concatenate([np.zeros((1, vocab)), up_to, -up_to, one, -one, luck])


BORDER = 0.5
"""How far a log-probability may move where keys and values are quantized: a number on the border of two codes takes
either.
"""
SAME = ("text", "finish_reason", "thinking", "raw_text", "stop_string", "notes", "tool_calls")
SAME_USAGE = ("prompt_tokens", "completion_tokens", "dropped_tokens", "thinking_tokens")


@dataclass
class Compared:
    """The answers of an engine that speculates, beside those of one that does not."""

    driver: Driver
    kind: Kind
    keep: KeepPolicy | None
    forced: bool
    refused: bool
    """Whether memory was refused, which may end answers early."""
    counts: Counts

    def request(self, where: str, asked: Asked, handle: RequestHandle, other: Completion) -> None:
        """Compare all answers to a request. `other` has all of them, if the best are to be chosen."""
        counts, kind = self.counts, self.kind
        try:
            mine = handle.result(0)
        except CortexError as error:
            assert self.refused, f"{where}: {error}: {asked}"
            counts.failed += 1
            return
        counts.answers += asked.answers
        counts.kinds[kind.name] += asked.answers
        for name in asked.wishes:
            counts.asked[name] += asked.answers
        others = (other, *other.others)
        told = ["" for _ in others]
        for event in handle:
            told[event.index] += event.text
        for one in (mine, *mine.others):
            counts.tokens += len(one.token_ids)
            if asked.chosen_later:
                self._one_of(where, asked, one, others)
                continue
            assert told[one.index] == one.text, f"{where}: {told[one.index]!r} was told of {one}"
            self._answer(where, asked, one, others[one.index])

    def _one_of(self, where: str, asked: Asked, mine: Completion, others: tuple[Completion, ...]) -> None:
        """One of the best is one of all, unless it differs from each of them by a tie."""
        if mine.finish_reason is FinishReason.CANCELLED or self.refused:
            return
        if not any(mine.token_ids == other.token_ids and mine.text == other.text for other in others):
            self._answer(where, asked, mine, max(others, key=lambda other: _common(mine, other)))

    def _answer(self, where: str, asked: Asked, mine: Completion, other: Completion) -> None:
        counts, common = self.counts, _common(mine, other)
        cancelled = mine.finish_reason is FinishReason.CANCELLED
        cut = self.refused and mine.finish_reason is FinishReason.LENGTH and len(mine.token_ids) == common
        self._logprobs(where, mine, other, common)
        counts.cancelled += cancelled
        if common < min(len(mine.token_ids), len(other.token_ids)):
            size = self._tie(asked, mine, other, common)
            assert size is not None, f"{where}: they differ at {common}: {asked}\n{mine}\n{other}"
            counts.ties[size] += 1
            return
        short = len(mine.token_ids) < len(other.token_ids)
        counts.cut += cut and short
        if cancelled or (cut and short):
            return
        differences = [name for name in SAME if getattr(mine, name) != getattr(other, name)]
        differences += [name for name in SAME_USAGE if getattr(mine.usage, name) != getattr(other.usage, name)]
        assert len(mine.token_ids) == len(other.token_ids) and not differences, (
            f"{where}: {differences} differ: {asked}\n{mine}\n{other}"
        )

    def _logprobs(self, where: str, mine: Completion, other: Completion, common: int) -> None:
        """The log-probabilities of tokens that are the same."""
        if mine.logprobs is None or other.logprobs is None:
            return
        assert [one.token_id for one in mine.logprobs] == list(mine.token_ids), where
        noise = NOISE if self.kind.kv_bits is None else BORDER
        for one, two in zip(mine.logprobs[:common], other.logprobs[:common], strict=True):
            values = [(one.logprob, two.logprob), *((a, b) for (_, a), (_, b) in zip(one.top, two.top, strict=True))]
            farthest = max(abs(a - b) for a, b in values)
            assert farthest < noise, f"{where}: {one} is not {two}"
            self.counts.logprobs += len(values)
            if self.kind.kv_bits is None:
                self.counts.farthest_logprob = max(self.counts.farthest_logprob, farthest)

    def _tie(self, asked: Asked, mine: Completion, other: Completion, place: int) -> str | None:
        """By how much logits must change for the tokens at a place to differ; None if that is no tie."""
        model, before = judge(self.kind.folder, self.kind.adapter), list(other.token_ids[:place])
        text = [*asked.prompt, *before]
        if self.keep is not None:
            text = self._kept(asked.prompt, before)
        tokens = mine.token_ids[place], other.token_ids[place]
        if self.kind.kv_bits is not None:
            gap = gap_of(model, text, tokens[:1], tokens[1:], self.kind.kv_bits, 32)
            return "two codes" if gap is not None and gap[1] < NOISE else None
        seed, prompt = answer_seed(asked.seed, other.index), tuple(asked.prompt)
        row = SamplingRow(asked.sampling, seed, prompt, list(before))  # without the caller's functions
        size = tie_size(model, text, row, self._mask(asked, before), tokens)
        return None if size is None else f"{size:g}"

    def _kept(self, prompt: list[int], before: list[int]) -> list[int]:
        """What is left of a text that drops tokens."""
        assert self.keep is not None
        text = list(prompt)
        self.keep.remove_surplus(text)
        for token in before:
            text.append(token)
            self.keep.remove_surplus(text)
        return text

    def _mask(self, asked: Asked, before: list[int]) -> Any:
        """The tokens that a form allows; None: all."""
        if not asked.constrained:
            return None
        grammar = self.driver.grammars.compile(asked.sampling.form, asked.thoughts, asked.calls)
        matcher = grammar.make_matcher(self.forced)
        for token in before:
            matcher.accept(token)
        return fill_masks([(matcher, ())])[0]


def _common(one: Completion, other: Completion) -> int:
    """How many tokens two answers begin with alike."""
    pairs = list(zip(one.token_ids, other.token_ids, strict=False))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
