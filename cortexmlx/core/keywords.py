"""Typed keyword arguments: sampling parameters of a call (`generate(prompt, max_tokens=5)`), and options of an
engine.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar, Unpack

from cortexmlx.core.arguments import is_list
from cortexmlx.errors import InvalidRequest
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.structured.tools import Tool
from cortexmlx.types.messages import meant
from cortexmlx.types.sampling_params import LogitsProcessor, SamplingParams

P = ParamSpec("P")
S = TypeVar("S")


class SamplingKeywords(TypedDict, total=False):
    """The parameters of `SamplingParams` by name."""

    max_tokens: int | None
    max_thinking_tokens: int | None
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
    structured: StructuredOutput | Mapping[str, Any] | type | str | None
    tools: Sequence[Tool | Mapping[str, Any] | Callable[..., object]]
    tool_choice: str
    parallel_tool_calls: bool


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
    _check_names("parameter", keywords, [field.name for field in fields(SamplingParams)], "SamplingParams")
    return replace(base, **keywords)


def with_keywords_each(
    params: SamplingParams | Iterable[SamplingParams] | None, **keywords: Unpack[SamplingKeywords]
) -> SamplingParams | Iterable[SamplingParams]:
    """Apply `with_keywords` to the parameters of many prompts: one for all, or one each. The items of an iterator,
    which may be endless, are read one by one.
    """
    if isinstance(params, (SamplingParams, str)) or not is_list(params):
        return with_keywords(checked_params(params), **keywords)
    if isinstance(params, Sequence):
        return [with_keywords(each, **keywords) for each in params]
    with_keywords(None, **keywords)
    return (with_keywords(checked_params(each), **keywords) for each in params)


def takes_options_of(
    config: Callable[P, object],
) -> Callable[[Callable[Concatenate[S, ...], None]], Callable[Concatenate[S, P], None]]:
    """Return a decorator that gives a constructor the parameters of the class `config`, for type checkers, editors and
    `help`. The constructor raises TypeError for other names.
    """
    theirs = inspect.signature(config)

    def give(init: Callable[Concatenate[S, ...], None]) -> Callable[Concatenate[S, P], None]:
        @functools.wraps(init)
        def checked(me: S, *args: Any, **options: Any) -> None:
            _check_names("option", options, theirs.parameters, f"help({type(me).__name__})")
            init(me, *args, **options)

        me = next(iter(inspect.signature(init).parameters.values()))
        checked.__signature__ = theirs.replace(  # type: ignore[attr-defined]
            parameters=[me, *theirs.parameters.values()], return_annotation=None
        )
        return checked  # type: ignore[return-value]  # it takes what its signature says

    return give


def _check_names(kind: str, given: Iterable[str], names: Collection[str], see: str) -> None:
    """Raise TypeError for a name that is not in `names`, and suggest the nearest one."""
    strange = next((name for name in given if name not in names), None)
    if strange is not None:
        raise TypeError(f"there is no {kind} {strange!r}{meant(strange, names)}: see {see}")
