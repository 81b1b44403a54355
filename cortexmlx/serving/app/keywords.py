"""Sampling parameters as keywords of a call: `generate(prompt, max_tokens=5)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TypedDict, Unpack

from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import meant
from cortexmlx.request import LogitsProcessor, SamplingParams
from cortexmlx.serving.app.arguments import is_list


class SamplingKeywords(TypedDict, total=False):
    """The parameters of `SamplingParams` by name."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    repetition_context: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    logits_processors: Sequence[LogitsProcessor]
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    seed: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    n: int
    best_of: int | None
    priority: int


def checked_params(params: object) -> SamplingParams:
    """`params`, or the defaults for None. Raises InvalidRequest for anything else."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(
            f"params is {params!r:.120}, but must be SamplingParams or None: write SamplingParams(max_tokens=5), or "
            "generate(prompt, max_tokens=5)"
        )
    return params


def with_keywords(params: SamplingParams | None, **keywords: Unpack[SamplingKeywords]) -> SamplingParams:
    """`params` (None: the defaults) with the `keywords` changed.

    Raises InvalidRequest for a wrong value, and TypeError for a name that is no parameter.
    """
    base = checked_params(params)
    if not keywords:
        return base
    names = [field.name for field in fields(SamplingParams)]
    strange = next((name for name in keywords if name not in names), None)
    if strange is not None:
        raise TypeError(f"there is no parameter {strange!r}{meant(strange, names)}: see SamplingParams")
    return replace(base, **keywords)


def with_keywords_each(
    params: SamplingParams | Iterable[SamplingParams] | None, **keywords: Unpack[SamplingKeywords]
) -> SamplingParams | Iterable[SamplingParams]:
    """`with_keywords` of the parameters of many prompts: the same for all, or one each. Those of an iterator, which may
    have no end, are read one by one.
    """
    if isinstance(params, (SamplingParams, str)) or not is_list(params):
        return with_keywords(checked_params(params), **keywords)
    if isinstance(params, Sequence):
        return [with_keywords(each, **keywords) for each in params]
    with_keywords(None, **keywords)
    return (with_keywords(checked_params(each), **keywords) for each in params)
