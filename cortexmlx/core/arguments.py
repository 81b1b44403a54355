"""Checks the arguments of API calls, and names the wrong one in the error."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeGuard, TypeVar, Unpack

from cortexmlx.errors import InvalidRequest
from cortexmlx.stats import MemoryPressure
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.structured.tools import Tool
from cortexmlx.types.messages import suggest_name
from cortexmlx.types.sampling_params import LogitsProcessor, SamplingParams

T = TypeVar("T")

MAX_NAME_CHARACTERS = 1024
"""Characters of a client's name. The name is hashed for each of its requests, on the engine's thread."""


def is_list(value: object) -> TypeGuard[Iterable[object]]:
    """Return whether a value is a list or another iterable of items: not bytes, a mapping or an array without axes."""
    array_of_one = getattr(value, "shape", None) == ()
    return isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray, Mapping)) and not array_of_one


def checked_text(name: str, text: str | None, max_characters: int | None = None) -> str | None:
    """Return a text as a plain `str`, or None. Raises InvalidRequest for anything else, and for more than
    `max_characters` characters. A subclass of `str` could compare, hash or measure differently.
    """
    if text is None:
        return None
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} is {text!r:.80}, but must be a text or None")
    text = str.__str__(text)
    if max_characters is not None and len(text) > max_characters:
        raise InvalidRequest(f"{name} has {len(text):,} characters, but must have at most {max_characters:,}")
    return text


def checked_client(client: str | None) -> str | None:
    """Return a client's name as a plain `str`, or None. Raises InvalidRequest if it is not a text, or too long."""
    return checked_text("client", client, MAX_NAME_CHARACTERS)


def checked_adapter(adapter: str | None) -> str | None:
    """Return an adapter's name as a plain `str`, or None. Raises InvalidRequest if it is not a text, or too long."""
    return checked_text("adapter", adapter, MAX_NAME_CHARACTERS)


def is_adapter_name(value: object) -> bool:
    """Return whether an adapter can have this name: a text of 1 to 1,024 characters."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARACTERS


def checked_function(name: str, function: T) -> T:
    """Return the argument if it is a function or None. Raises InvalidRequest for anything else."""
    if function is not None and not callable(function):
        raise InvalidRequest(f"{name} is {function!r:.80}, but must be a function or None")
    return function


def checked_tokens(tokens: Iterable[int], vocab_size: int) -> list[int]:
    """Return token ids as plain integers. Raises InvalidRequest for anything outside the vocabulary."""
    if not is_list(tokens):
        raise InvalidRequest(f"tokens are a list of token ids, not {tokens!r:.80}")
    ids: list[int] = []
    for token in tokens:
        if not isinstance(token, Integral) or not 0 <= token < vocab_size:
            raise InvalidRequest(f"token id {token!r} is outside the vocabulary of {vocab_size} tokens")
        ids.append(int(token))
    return ids


def checked_token(token: int) -> int:
    """Return a token id as a plain integer. Raises InvalidRequest for anything else."""
    if not isinstance(token, Integral):
        raise InvalidRequest(f"a token id is an integer, not {token!r:.80}")
    return int(token)


def checked_pressure_level(level: MemoryPressure | str) -> MemoryPressure:
    """Return the MemoryPressure of this name. Raises InvalidRequest for other names."""
    try:
        return MemoryPressure(level)
    except ValueError:
        raise InvalidRequest(f'level is {level!r}, but must be "warning" or "critical"') from None


# Typed keyword arguments: sampling parameters of a call (`generate(prompt, max_tokens=5)`), and options of an engine.


P = ParamSpec("P")
S = TypeVar("S")


class KeywordsBesideTools(TypedDict, total=False):
    """All sampling parameters except `tools`, as typed keyword arguments with the names of `SamplingParams`."""

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
    tool_choice: str
    parallel_tool_calls: bool


class SamplingKeywords(KeywordsBesideTools, total=False):
    """All sampling parameters as typed keyword arguments."""

    tools: Sequence[Tool | Mapping[str, Any] | Callable[..., object]]


def checked_params(params: object) -> SamplingParams:
    """Return `params`, or the default parameters for None. Raises InvalidRequest for anything else."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(
            f"params is {params!r:.120}, but must be SamplingParams or None: write SamplingParams(max_tokens=5), or "
            "generate(prompt, max_tokens=5)"
        )
    return params


_OTHER_NAMES = {
    "client": "an argument of submit and conversation",
    "num_predict": "max_tokens",
    "response_format": "structured",
    "temp": "temperature",
}
"""Names that other programs, or other functions here, have for what a sampling parameter is."""


def with_keywords(params: SamplingParams | None, **keywords: Unpack[SamplingKeywords]) -> SamplingParams:
    """Return `params` (None: the defaults) with the given sampling parameters changed.

    Raises InvalidRequest for a wrong value, and TypeError for a name that is no parameter.
    """
    base = checked_params(params)
    if not keywords:
        return base
    here = next((f"it is {_OTHER_NAMES[name]} here" for name in keywords if name in _OTHER_NAMES), "see SamplingParams")
    _check_known_names("parameter", keywords, [field.name for field in fields(SamplingParams)], here)
    return replace(base, **keywords)


def with_keywords_each(
    params: SamplingParams | Iterable[SamplingParams] | None, **keywords: Unpack[SamplingKeywords]
) -> SamplingParams | Iterable[SamplingParams]:
    """Apply `with_keywords` to one set of parameters or to several. An iterator, maybe endless, is read lazily."""
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
    config_signature = inspect.signature(config)

    def decorate(init: Callable[Concatenate[S, ...], None]) -> Callable[Concatenate[S, P], None]:
        @functools.wraps(init)
        def checked_init(me: S, *args: Any, **options: Any) -> None:
            _check_known_names("option", options, config_signature.parameters, f"see help({type(me).__name__})")
            init(me, *args, **options)

        me = next(iter(inspect.signature(init).parameters.values()))
        checked_init.__signature__ = config_signature.replace(  # type: ignore[attr-defined]
            parameters=[me, *config_signature.parameters.values()], return_annotation=None
        )
        return checked_init  # type: ignore[return-value]  # it takes what its signature says

    return decorate


def _check_known_names(kind: str, given_names: Iterable[str], names: Collection[str], advice: str) -> None:
    """Raise TypeError for a name that is not in `names`, and suggest the nearest one."""
    unknown_name = next((name for name in given_names if name not in names), None)
    if unknown_name is not None:
        raise TypeError(f"there is no {kind} {unknown_name!r}{suggest_name(unknown_name, names)}: {advice}")
