"""One batched sampler: from the logits of a step to one token per row, without waiting for the device.

Decode runs one step ahead of what the host has read, so the sampler takes lazy logits and returns lazy tokens. When the
rows of a batch are known, they are sorted by three ways to choose (greedy, from a shortlist, from the whole
vocabulary). Each step then pays only for the ways and options that some row asked for. A row's token depends on its own
logits, seed, history and token index alone, never on its neighbours.

`PendingStep` is a step in flight. `read_result` brings its results to the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from traceback import format_exception
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.cpu.powers_of_two import LOG2_E, exp2
from cortexmlx.errors import CortexError, LogitsProcessorError, with_causes
from cortexmlx.execution.boundary import StepResult, TokenMask
from cortexmlx.execution.logits import (
    NO_TOKEN,
    draw,
    log2_ratio_to_max,
    log_sum_exp,
    mask_logits,
    nucleus_threshold,
    row_sum,
    token_uniforms,
    top_tokens,
)
from cortexmlx.execution.prompt_scores import PromptResults
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.system.machine import is_memory_refusal
from cortexmlx.types.arrays import TokenList, dtype_name
from cortexmlx.types.sampling_params import LogitsProcessor, SamplingParams, TokenBiases

TokenIndex = npt.NDArray[np.integer[Any]]

_MIN_POSITIVE = 1e-30  # keeps float32 quotients by a temperature finite and products with top_p positive


@dataclass(frozen=True)
class SampledTokens:
    """The chosen tokens of one step, with log-probabilities if rows asked for them, as lazy arrays. Log-probabilities
    are those of the model's own logits, before penalties, filters and temperature. Rows that did not ask for them
    hold NaN and -1.
    """

    tokens: mx.array
    """`[R] int32`; `NO_TOKEN` where all logits are -inf, or NaN."""
    logprobs: mx.array | None = None
    """`[R] float32`, of each token; None unless some row asked."""
    top_ids: mx.array | None = None
    """`[R, k] int32`: the likeliest tokens, best first, as many as some row asked for; None if that is 0."""
    top_logprobs: mx.array | None = None
    """`[R, k] float32`."""
    failures: Mapping[int, CortexError] = field(default_factory=dict)
    """What the processors of single rows raised. The tokens of these rows are meaningless."""

    def arrays(self) -> list[mx.array]:
        """Return all arrays that are not None, for one `mx.async_eval`."""
        return [a for a in (self.tokens, self.logprobs, self.top_ids, self.top_logprobs) if a is not None]


@dataclass(frozen=True)
class PendingStep:
    """A step in flight: its lazy tokens, and a function that computes its results for prompts."""

    sampled_tokens: SampledTokens | None
    started: float
    compute_prompt_results: Callable[[], PromptResults] | None = None


def read_result(pending: PendingStep) -> StepResult:
    """Wait for the results of a step, and return them on the host."""
    sampled_tokens = pending.sampled_tokens
    prompt_results = PromptResults() if pending.compute_prompt_results is None else pending.compute_prompt_results()
    if sampled_tokens is None:
        return StepResult(
            time.perf_counter() - pending.started, scores=prompt_results.scores, pooled=prompt_results.pooled
        )
    mx.eval(sampled_tokens.arrays())
    return StepResult(
        time.perf_counter() - pending.started,
        _to_list(sampled_tokens.tokens),
        None if sampled_tokens.logprobs is None else _to_list(sampled_tokens.logprobs),
        None if sampled_tokens.top_ids is None else _to_list(sampled_tokens.top_ids),
        None if sampled_tokens.top_logprobs is None else _to_list(sampled_tokens.top_logprobs),
        prompt_results.scores,
        sampled_tokens.failures,
        prompt_results.pooled,
    )


def _to_list(array: mx.array) -> Any:
    return array.tolist()


class Sampler(Protocol):
    """Chooses the next token of every row: see `BatchSampler`."""

    def __call__(
        self,
        logits: mx.array,
        token_index: TokenIndex,
        live_flags: Sequence[bool] | None = None,
        mask: TokenMask | None = None,
    ) -> SampledTokens: ...


MakeSampler = Callable[[Sequence[SamplingRow], int, Mapping[JobId, Sequence[LogitsProcessor]]], Sampler]
"""Makes the sampler of some rows: with the size of the vocabulary, and the functions of jobs that rows name."""


class BatchSampler:
    """Chooses the next token of every row, for a batch of rows that stays the same from step to step.

    The order is that of mlx-lm: logit bias, repetition penalty, presence and frequency penalties, the row's own
    processors, the mask of allowed tokens; then top-p, min-p and top-k on the probabilities at temperature 1; then the
    draw at the row's temperature.
    """

    def __init__(
        self, rows: Sequence[SamplingRow], vocab_size: int, processors: Mapping[JobId, Sequence[LogitsProcessor]] = {}
    ) -> None:
        """Prepare what all steps share. There must be at least one row, and the parameters must be valid for
        `vocab_size`. `processors` are each job's logits processors; a row names its job as `processed_for`.
        """
        params = [row.params for row in rows]
        self._bias = _make_logit_bias(rows)
        self._histories = [
            history for make in (_make_repetition_penalty, _make_count_penalty) if (history := make(rows)) is not None
        ]
        self._processors: LogitsProcessors | None = None
        functions = [() if row.processed_for is None else processors[row.processed_for] for row in rows]
        if any(functions):
            tokens = [
                [*row.prompt, *row.output] if row_functions else ()
                for row, row_functions in zip(rows, functions, strict=True)
            ]
            self._processors = LogitsProcessors(functions, tokens)
        self._groups = _group_rows(rows, vocab_size)
        order = np.concatenate([group.rows for group in self._groups])
        self._original_order = mx.array(np.argsort(order).astype(np.int32))
        self._logprobs = _LogprobReader(params) if any(p.logprobs is not None for p in params) else None

    def __call__(
        self,
        logits: mx.array,
        token_index: TokenIndex,
        live_flags: Sequence[bool] | None = None,
        mask: TokenMask | None = None,
    ) -> SampledTokens:
        """Choose one token per row, out of those that `mask` allows.

        `logits [R, V]` have any float dtype, lazy or not. `token_index [R]` is how many tokens each row has generated
        before this one. The penalties of the next call count the returned tokens, too. Rows without their flag in
        `live_flags` are computed and ignored: their processors are not called.
        """
        adjusted_logits = self._apply_changes(logits)
        failures: Mapping[int, CortexError] = {}
        if self._processors is not None:
            adjusted_logits, failures = self._processors.apply(adjusted_logits, live_flags)
        if mask is not None:
            adjusted_logits = mask_logits(adjusted_logits, mask)
        tokens = self._choose(adjusted_logits, token_index)
        for history in self._histories:
            history.change.append(history.select(tokens))
        if self._processors is not None:
            self._processors.append(tokens)
        sampled_tokens = SampledTokens(tokens) if self._logprobs is None else self._logprobs(logits, tokens)
        return replace(sampled_tokens, failures=failures) if failures else sampled_tokens

    def _apply_changes(self, logits: mx.array) -> mx.array:
        """Return the logits after bias and penalties."""
        if self._bias is None and not self._histories and self._processors is None:
            return logits
        logits = logits.astype(mx.float32)
        if self._bias is not None:
            logits = self._bias.apply(logits)
        for history in self._histories:
            logits = history.apply(logits)
        return logits

    def _choose(self, logits: mx.array, token_index: TokenIndex) -> mx.array:
        """Choose a token for every row, group by group."""
        if len(self._groups) == 1:
            return self._groups[0].choose(logits, token_index)
        chosen_tokens = [group.choose(logits[group.rows_on_device], token_index[group.rows]) for group in self._groups]
        return mx.concatenate(chosen_tokens)[self._original_order]


_TokenChooser = Callable[[mx.array, TokenIndex], mx.array]
"""Chooses tokens for its own rows only: `logits [n, V]`, `token_index [n]` -> tokens `[n] int32`."""


@dataclass(frozen=True)
class _RowGroup:
    """The rows of the batch whose tokens are chosen in the same way."""

    rows: npt.NDArray[np.int32]
    rows_on_device: mx.array
    choose: _TokenChooser


def _group_rows(rows: Sequence[SamplingRow], vocab_size: int) -> list[_RowGroup]:
    """Group rows by the way their tokens are chosen: greedy, top-k, or from the whole vocabulary."""
    makers: dict[Callable[[list[SamplingRow]], _TokenChooser], list[int]] = {}
    for index, row in enumerate(rows):
        p = row.params
        if p.temperature == 0.0:
            makers.setdefault(_GreedyChooser, []).append(index)
        elif 0 < p.top_k < vocab_size:
            makers.setdefault(_TopKChooser, []).append(index)
        else:
            makers.setdefault(_FullVocabularyChooser, []).append(index)
    return [
        _RowGroup(np.array(members, np.int32), mx.array(members), make([rows[i] for i in members]))
        for make, members in makers.items()
    ]


class _GreedyChooser:
    """Chooses for rows at temperature 0: the best token, with the lowest id among equals."""

    def __init__(self, rows: Sequence[SamplingRow]) -> None:
        pass

    def __call__(self, logits: mx.array, token_index: TokenIndex) -> mx.array:
        best_ids = mx.argmax(logits, axis=-1, keepdims=True).astype(mx.int32)
        is_number = mx.take_along_axis(logits, best_ids, axis=-1) > -mx.inf  # of NaN nothing is true
        return mx.where(is_number, best_ids, NO_TOKEN)[:, 0]


class _TopKChooser:
    """Chooses for rows with top-k: only their k best tokens are looked at, in order."""

    def __init__(self, rows: Sequence[SamplingRow]) -> None:
        params = [row.params for row in rows]
        self._seeds = _seed_array(rows)
        self._width = max(p.top_k for p in params)
        self._within_k = mx.array(np.arange(self._width) < np.array([[p.top_k] for p in params]))
        self._top_p = (
            _to_column([max(p.top_p, _MIN_POSITIVE) for p in params]) if any(p.top_p < 1.0 for p in params) else None
        )
        self._all_mass = mx.array([[p.top_p == 1.0] for p in params])
        self._min_bits = _min_p_bits(params)
        self._inverse_temperature = _inverse_temperature(params)

    def __call__(self, logits: mx.array, token_index: TokenIndex) -> mx.array:
        logits = logits.astype(mx.float32)
        top_logits, top_ids = top_tokens(logits, self._width)
        bits = (top_logits - top_logits[:, :1]) * LOG2_E
        keep = self._within_k
        if self._top_p is not None:
            mass = self._top_p * row_sum(exp2(log2_ratio_to_max(logits)))
            inside = (mx.cumsum(exp2(bits), axis=-1, inclusive=False) < mass) | self._all_mass
            # What ties with the last token inside stays, as it does where the nucleus is found by a threshold.
            keep = keep & (bits >= mx.min(mx.where(inside, bits, 0.0), axis=-1, keepdims=True))
        if self._min_bits is not None:
            keep = keep & (bits >= self._min_bits)
        weights = mx.where(keep, exp2(_divide_by_temperature(bits, self._inverse_temperature)), 0.0)
        position = draw(weights, mx.array(token_uniforms(self._seeds, token_index)))
        return mx.where(position < 0, NO_TOKEN, mx.take_along_axis(top_ids, position[:, None], axis=1)[:, 0])


class _FullVocabularyChooser:
    """Chooses for rows without top-k: any token of the vocabulary that passes top-p and min-p."""

    def __init__(self, rows: Sequence[SamplingRow]) -> None:
        params = [row.params for row in rows]
        self._seeds = _seed_array(rows)
        self._nucleus = np.array([i for i, p in enumerate(params) if p.top_p < 1.0], np.int32)
        self._top_p = _to_column([max(params[i].top_p, _MIN_POSITIVE) for i in self._nucleus])
        # Where each row finds its threshold behind the leading zero of the rows that keep everything.
        self._threshold_of = np.zeros(len(params), np.int32)
        self._threshold_of[self._nucleus] = np.arange(1, len(self._nucleus) + 1)
        self._min_bits = _min_p_bits(params)
        self._inverse_temperature = _inverse_temperature(params)

    def __call__(self, logits: mx.array, token_index: TokenIndex) -> mx.array:
        bits = log2_ratio_to_max(logits.astype(mx.float32))
        weights = exp2(_divide_by_temperature(bits, self._inverse_temperature))
        if len(self._nucleus):
            base_weights = weights if self._inverse_temperature is None else exp2(bits)
            weights = mx.where(base_weights >= self._nucleus_thresholds(base_weights), weights, 0.0)
        if self._min_bits is not None:
            weights = mx.where(bits >= self._min_bits, weights, 0.0)
        return draw(weights, mx.array(token_uniforms(self._seeds, token_index)))

    def _nucleus_thresholds(self, weights: mx.array) -> mx.array:
        """Return the smallest weight that each row keeps, `[n, 1]`: 0 for rows without top-p."""
        if len(self._nucleus) == weights.shape[0]:
            return nucleus_threshold(weights, self._top_p)
        thresholds = nucleus_threshold(weights[mx.array(self._nucleus)], self._top_p)
        return mx.concatenate([mx.zeros((1, 1)), thresholds])[mx.array(self._threshold_of)]


class _LogprobReader:
    """Computes log-probabilities of the chosen and of the likeliest tokens, for the rows that asked for them."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        logprob_rows = [i for i, p in enumerate(params) if p.logprobs is not None]
        self._logprob_rows = mx.array(logprob_rows)
        self._count = max(params[i].logprobs or 0 for i in logprob_rows)
        self._all = len(logprob_rows) == len(params)
        spread_index = np.full(len(params), len(logprob_rows), np.int32)
        spread_index[logprob_rows] = np.arange(len(logprob_rows))
        self._spread_index = mx.array(spread_index)

    def __call__(self, logits: mx.array, tokens: mx.array) -> SampledTokens:
        chosen_tokens = tokens if self._all else tokens[self._logprob_rows]
        logits = (logits if self._all else logits[self._logprob_rows]).astype(mx.float32)
        total = log_sum_exp(logits)
        logprobs = self._spread((mx.take_along_axis(logits, chosen_tokens[:, None], axis=1) - total)[:, 0], mx.nan)
        if self._count == 0:
            return SampledTokens(tokens, logprobs)
        top_logits, top_ids = top_tokens(logits, min(self._count, logits.shape[-1]))
        return SampledTokens(tokens, logprobs, self._spread(top_ids, -1), self._spread(top_logits - total, mx.nan))

    def _spread(self, values: mx.array, fill_value: float) -> mx.array:
        """Spread the values of the asking rows over all rows, with `fill_value` for the others."""
        if self._all:
            return values
        return mx.concatenate([values, mx.full((1, *values.shape[1:]), fill_value, values.dtype)])[self._spread_index]


def _make_logit_bias(rows: Sequence[SamplingRow]) -> SubsetChange[LogitBias] | None:
    """Return the bias of the rows that have one; None if there are none."""
    biased_rows = [i for i, row in enumerate(rows) if row.params.logit_bias]
    return (
        SubsetChange(LogitBias([rows[i].params.logit_bias for i in biased_rows]), biased_rows, len(rows))
        if biased_rows
        else None
    )


def _make_repetition_penalty(rows: Sequence[SamplingRow]) -> SubsetChange[RepetitionPenalty] | None:
    """Return the repetition penalty of the rows that have one; None if there are none."""
    penalised_rows = [i for i, row in enumerate(rows) if row.params.repetition_penalty != 1.0]
    if not penalised_rows:
        return None
    params = [rows[i].params for i in penalised_rows]
    contexts = [p.repetition_context for p in params]
    last_tokens = [_last_tokens(rows[i], count) for i, count in zip(penalised_rows, contexts, strict=True)]
    return SubsetChange(
        RepetitionPenalty(last_tokens, [p.repetition_penalty for p in params], contexts), penalised_rows, len(rows)
    )


def _make_count_penalty(rows: Sequence[SamplingRow]) -> SubsetChange[CountPenalty] | None:
    """Return the presence and frequency penalties of the rows that have some; None if there are none."""
    penalised_rows = [i for i, row in enumerate(rows) if row.params.presence_penalty or row.params.frequency_penalty]
    if not penalised_rows:
        return None
    params, outputs = [rows[i].params for i in penalised_rows], [rows[i].output for i in penalised_rows]
    presence, frequency = [p.presence_penalty for p in params], [p.frequency_penalty for p in params]
    return SubsetChange(CountPenalty(outputs, presence, frequency), penalised_rows, len(rows))


def _last_tokens(row: SamplingRow, count: int) -> npt.NDArray[np.int32]:
    """Return the last `count` tokens of prompt and output."""
    output = np.asarray(row.output[-count:], np.int32)
    prompt_count = count - len(output)
    prompt = np.asarray(row.prompt[-prompt_count:] if prompt_count else (), np.int32)
    return np.concatenate([prompt, output])


def _seed_array(rows: Sequence[SamplingRow]) -> npt.NDArray[np.uint64]:
    """Return the seed of each row as 64 bits."""
    return np.array([row.seed % (1 << 64) for row in rows], np.uint64)


def _to_column(values: Sequence[float]) -> mx.array:
    """Return one value per row as `[n, 1] float32`."""
    return mx.array(np.array(values, np.float32)[:, None])


def _min_p_bits(params: Sequence[SamplingParams]) -> mx.array | None:
    """Return the base-2 log of each row's min-p, `[n, 1]`; None if no row uses it."""
    if all(p.min_p == 0.0 for p in params):
        return None
    with np.errstate(divide="ignore"):
        return _to_column(np.log2([p.min_p for p in params]).tolist())


def _inverse_temperature(params: Sequence[SamplingParams]) -> mx.array | None:
    """Return 1 / temperature of each row, `[n, 1]`; None if every row is at temperature 1."""
    if all(p.temperature == 1.0 for p in params):
        return None
    return _to_column([1.0 / max(p.temperature, _MIN_POSITIVE) for p in params])


def _divide_by_temperature(bits: mx.array, inverse_temperature: mx.array | None) -> mx.array:
    """Return `bits` divided by the temperature of each row."""
    return bits if inverse_temperature is None else bits * inverse_temperature


# Changes to the logits before a token is chosen: bias, repetition, presence and frequency penalties.
#
# All rows are changed at once, and only the logits of the tokens concerned. The histories are on the device, and grow
# by the tokens just sampled, which the host has not read yet. A row that asks for nothing is passed through bit by bit.
#
# One trick serves all three: the tokens of a row are listed in a rectangle `[R, width]`, and the new logits are *set*,
# not added to. So a list may name a token twice, as long as both entries have the same new value, and short lists are
# filled up with their own entries.


C = TypeVar("C", bound="LogitChange")


class LogitChange(Protocol):
    """A change to the logits of a batch's rows, such as a bias or a penalty."""

    def apply(self, logits: mx.array) -> mx.array:
        """Return the changed logits `[R, V] float32`."""


class SubsetChange(Generic[C]):
    """Applies a change to some rows of a batch. The other rows cost nothing."""

    def __init__(self, change: C, rows: Sequence[int], total: int) -> None:
        """`rows`, of `total` rows, are those that `change` changes."""
        self.change = change
        self._rows = None if len(rows) == total else mx.array(list(rows))

    def apply(self, logits: mx.array) -> mx.array:
        """Return `logits [R, V] float32` with the change applied to its rows."""
        if self._rows is None:
            return self.change.apply(logits)
        changed_logits = logits[:]
        changed_logits[self._rows] = self.change.apply(logits[self._rows])
        return changed_logits

    def select(self, tokens: mx.array) -> mx.array:
        """Return the tokens of the changed rows out of `tokens [R]`."""
        return tokens if self._rows is None else tokens[self._rows]


class LogitBias:
    """Adds a constant to single logits, as `logit_bias` of the OpenAI API."""

    def __init__(self, biases: Sequence[Mapping[int, float]]) -> None:
        token_biases = [bias if isinstance(bias, TokenBiases) else TokenBiases(bias) for bias in biases]
        tokens = [np.frombuffer(bias.ids, np.int32) for bias in token_biases]
        values = [np.frombuffer(bias.amounts, np.float32) for bias in token_biases]
        self._tokens = mx.array(_pad_rows(tokens, np.int32))
        self._values = mx.array(_pad_rows(values, np.float32))

    def apply(self, logits: mx.array) -> mx.array:
        """Return `logits [R, V] float32` with the biases added."""
        biased_logits = mx.take_along_axis(logits, self._tokens, axis=1) + self._values
        return mx.put_along_axis(logits, self._tokens, biased_logits, axis=1)


class RepetitionPenalty:
    """Makes the last `context` tokens of prompt and answer less likely. Every row must have a penalty.

    Positive logits are divided by the penalty, negative ones multiplied (Keskar et al., arXiv:1909.05858), once however
    often the token occurs. This is the rule of mlx-lm's `make_repetition_penalty`.
    """

    def __init__(self, histories: Sequence[TokenList], penalties: Sequence[float], contexts: Sequence[int]) -> None:
        self._contexts = np.array(contexts)
        last = [np.asarray(h[-c:], np.int32) for h, c in zip(histories, self._contexts, strict=True)]
        self._lengths = np.array([len(tokens) for tokens in last])
        width = max(1, int(self._lengths.max()))
        self._tokens = mx.array(np.stack([np.pad(tokens, (width - len(tokens), 0)) for tokens in last]))
        self._penalties = np.array(penalties, np.float32)[:, None]

    def apply(self, logits: mx.array) -> mx.array:
        """Return `logits [R, V] float32` with the tokens of each row's context penalised."""
        width = self._tokens.shape[1]
        tokens = self._tokens
        in_context = np.arange(width) >= width - self._lengths[:, None]
        if not in_context.all():
            tokens = mx.where(mx.array(in_context), tokens, tokens[:, -1:])
        penalties = mx.array(np.where(self._lengths[:, None] > 0, self._penalties, np.float32(1.0)))
        token_logits = mx.take_along_axis(logits, tokens, axis=1)
        penalised_logits = mx.where(token_logits < 0, token_logits * penalties, token_logits / penalties)
        return mx.put_along_axis(logits, tokens, penalised_logits, axis=1)

    def append(self, tokens: mx.array) -> None:
        """Add the tokens `[R] int32` that were just sampled to the histories."""
        self._tokens = mx.concatenate([self._tokens, tokens[:, None]], axis=1)[:, -int(self._contexts.max()) :]
        self._lengths = np.minimum(self._lengths + 1, self._contexts)


class CountPenalty:
    """Lowers the logits of all tokens generated so far, as the OpenAI API defines it. Every row must have a penalty.

    `logit -= count * frequency + (count > 0) * presence`, where `count` is how often the answer has the token already.
    """

    def __init__(self, outputs: Sequence[TokenList], presence: Sequence[float], frequency: Sequence[float]) -> None:
        token_counts = [np.unique(np.asarray(output, np.int32), return_counts=True) for output in outputs]
        self._tokens = mx.array(_pad_rows([tokens for tokens, _ in token_counts], np.int32))
        self._counts = mx.array(_pad_rows([counts for _, counts in token_counts], np.int32))
        self._presence = mx.array(np.array(presence, np.float32)[:, None])
        self._frequency = mx.array(np.array(frequency, np.float32)[:, None])

    def apply(self, logits: mx.array) -> mx.array:
        """Return `logits [R, V] float32` less the penalties of the tokens generated so far."""
        penalties = self._counts * self._frequency + (self._counts > 0) * self._presence
        penalised_logits = mx.take_along_axis(logits, self._tokens, axis=1) - penalties
        return mx.put_along_axis(logits, self._tokens, penalised_logits, axis=1)

    def append(self, tokens: mx.array) -> None:
        """Count the tokens `[R] int32` that were just sampled."""
        tokens = tokens[:, None]
        is_repeat = self._tokens == tokens
        counts = self._counts + is_repeat
        new_counts = mx.max(mx.where(is_repeat, counts, 1), axis=1, keepdims=True)
        self._tokens = mx.concatenate([self._tokens, tokens], axis=1)
        self._counts = mx.concatenate([counts, new_counts], axis=1)


def _pad_rows(rows: Sequence[npt.NDArray[np.generic]], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """Stack rows of different lengths as `[R, width >= 1]`, padded with their first entry, or with zeros."""
    padded_rows = np.zeros((len(rows), max(1, *(len(row) for row in rows))), dtype)
    for padded_row, row in zip(padded_rows, rows, strict=True):
        if len(row):
            padded_row[: len(row)] = row
            padded_row[len(row) :] = row[0]
    return padded_rows


# Logits processors: functions of the caller that change a row's logits before its token is chosen.
#
# The signature is mlx-lm's, so its functions and those written for it work here:
#
# def processor(tokens: mx.array, logits: mx.array) -> mx.array
#
# `tokens [n] int32` are prompt and answer so far, of which the newest may be lazy. `logits` are `[1, V] float32`. A
# request's functions are called in their order, after its bias and penalties.


_LARGEST_LOGIT = 1e38
"""Replaces +inf, with which a processor chooses a token: differences of infinities are NaN."""


class LogitsProcessors:
    """The callers' own logits processors for the rows of a batch, and the tokens of those rows."""

    def __init__(self, processors: Sequence[Sequence[LogitsProcessor]], tokens: Sequence[Sequence[int]]) -> None:
        """`processors` are the functions of each row, and `tokens` the tokens of the rows that have functions."""
        functions_by_row = {index: functions for index, functions in enumerate(processors) if functions}
        self._rows = {index: _ProcessedRow(functions, tokens[index]) for index, functions in functions_by_row.items()}

    def apply(
        self, logits: mx.array, live_flags: Sequence[bool] | None = None
    ) -> tuple[mx.array, dict[int, LogitsProcessorError]]:
        """Call the processors of each live row. Return the changed logits `[R, V] float32`, and the errors, by row. A
        row with an error keeps its logits. Processors of a row that is not live, by `live_flags`, or that has failed
        before, are not called.
        """
        # Begun at once: it runs while the rows' own operations are built, and what those raise stays theirs.
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        parts, failures, end = [], {}, 0
        for index, row in self._rows.items():
            if row.has_failed or (live_flags is not None and not live_flags[index]):
                continue
            try:
                row_logits = row.process(logits[index : index + 1])
            except LogitsProcessorError as error:
                failures[index] = _drop_frames(error)
                row.has_failed = True
                continue
            parts += [logits[end:index], row_logits]
            end = index + 1
        return mx.concatenate([*parts, logits[end:]]), failures

    def append(self, tokens: mx.array) -> None:
        """Add the tokens `[R] int32` that were just sampled to the rows' tokens."""
        for index, row in self._rows.items():
            row.new_tokens.append(tokens[index : index + 1])


class _ProcessedRow:
    """A row with logits processors: its functions, the tokens known at first, and those sampled since, each `[1]`."""

    def __init__(self, functions: Sequence[LogitsProcessor], tokens: Sequence[int]) -> None:
        self.functions = functions
        self.initial_tokens = mx.array(np.array(tokens, np.int32))
        self.new_tokens: list[mx.array] = []
        self.has_failed = False

    def process(self, logits: mx.array) -> mx.array:
        """Return `logits [1, V] float32` after all of the row's functions. Raises LogitsProcessorError. A refusal of
        memory is raised unchanged, so that the step begins again with less.
        """
        for function in self.functions:
            name = getattr(function, "__qualname__", None) or type(function).__qualname__
            token_count = self.initial_tokens.size + len(self.new_tokens)
            try:
                # An array of its own for each call, which it may change.
                result = function(mx.concatenate([self.initial_tokens, *self.new_tokens]), logits[:])
                _check_logits(result, logits.shape)
                result = mx.minimum(result.astype(mx.float32), _LARGEST_LOGIT)
                mx.async_eval(result)  # type: ignore[no-untyped-call]  # what only evaluation raises, is raised here
            except BaseException as error:  # whatever it is, it is of this row alone
                if is_memory_refusal(error):
                    raise
                raise LogitsProcessorError(
                    f"logits processor {name} failed after {token_count} tokens: {type(error).__name__}: {error}"
                ) from error
            logits = result
        return logits


def _drop_frames(error: LogitsProcessorError) -> LogitsProcessorError:
    """Turn the error's traceback into a note, and return the error. Frames hold the step, its arrays and the model,
    and would keep them as long as the caller keeps the error.
    """
    assert error.__cause__ is not None
    error.add_note("".join(format_exception(error.__cause__)).rstrip())
    for each in with_causes(error):
        each.__traceback__ = None
    return error


def _check_logits(result: object, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless a processor returned float logits of this shape."""
    requirement = f"it must return float logits of shape {list(shape)}, as it was given"
    if not isinstance(result, mx.array):
        raise TypeError(f"{requirement}, but returned {type(result).__name__}")
    if result.shape != shape or not mx.issubdtype(result.dtype, mx.floating):
        kind = dtype_name(result.dtype)
        raise ValueError(f"{requirement}, but returned {kind} of shape {list(result.shape)}")
