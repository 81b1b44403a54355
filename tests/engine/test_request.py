"""SamplingParams: what is refused, and with which words; what passes; and that parameters are values."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx import CortexError, SamplingParams
from cortexmlx.errors import InvalidRequest
from cortexmlx.execution.sampling import BatchSampler
from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.types.sampling_params import MAX_STOP_CHARACTERS, MAX_STOP_TOKENS, MAX_STOPS

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = (
    "max_tokens",
    "top_k",
    "repetition_context",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "n",
    "best_of",
    "priority",
)
OPTIONAL = ("max_tokens", "max_thinking_tokens", "seed", "logprobs", "prompt_logprobs", "best_of")
LISTS = ("stop", "stop_token_ids", "logits_processors")
# The range that a message must name.
RANGES = {
    "max_tokens": "an integer in 1..2147483647 (0 only with prompt_logprobs) or None",
    "max_thinking_tokens": "an integer in 0..2147483647 or None",
    "temperature": "a number in [0, 100] (0: greedy)",
    "top_p": "a number in (0, 1]",
    "top_k": "an integer in 0..2147483647 (0: all tokens)",
    "min_p": "a number in [0, 1)",
    "repetition_penalty": "a number in [0.01, 100] (1: none)",
    "repetition_context": "an integer in 1..2147483647",
    "presence_penalty": "a number in [-100, 100]",
    "frequency_penalty": "a number in [-100, 100]",
    "seed": "an integer in -9223372036854775808..18446744073709551615 or None",
    "logprobs": "an integer in 0..100 or None",
    "prompt_logprobs": "an integer in 0..100 or None",
    "n": "an integer in 1..128",
    "best_of": "an integer in 1..128 (n or more) or None",
    "priority": "an integer in -2147483647..2147483647",
    "ignore_eos": "true or false",
    "stop": "a non-empty string or a list of them",
    "stop_token_ids": "a list of at most 16,384 token ids in 0..2147483647",
    "logits_processors": "a list of functions of (tokens, logits)",
    "structured": (
        "a JSON schema (a dict), a type, 'json', or StructuredOutput.regex(...), .choice(...) or .grammar(...)"
    ),
    "tools": "a list of functions or of mappings as in the OpenAI API",
    "tool_choice": "auto, none, required",
    "parallel_tool_calls": "true or false",
    "logit_bias": "a map from token ids in 0..2147483647 to numbers in -1e+09..1e+09",
}
HUGE = 10**400


def no_change(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits


def refusal(**params: Any) -> str:
    """The message: when parameters are made, or of a request to a model that has 1,000 tokens."""
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**params).validate(1000)
    assert isinstance(caught.value, CortexError) and isinstance(caught.value, ValueError)
    return str(caught.value)


def test_every_parameter_has_a_range_here() -> None:
    assert set(RANGES) == {f.name for f in dataclasses.fields(SamplingParams)}


WRONG: list[tuple[str, Any]] = [
    *((name, value) for name in NUMBERS for value in (math.nan, math.inf, -math.inf, HUGE, -HUGE, -100.5, 1e9)),
    *((name, value) for name in NUMBERS for value in (True, "0.5", None, [1.0], 1j, Decimal("0.5"), mx.array(0.5))),
    *((name, value) for name in INTEGERS for value in (True, 1.0, "1", math.nan, [1], np.float32(1), b"1")),
    *((name, None) for name in INTEGERS if name not in OPTIONAL),
    *((name, value) for name in INTEGERS for value in (HUGE, -HUGE)),
    *((name, -1) for name in INTEGERS if name not in ("seed", "priority")),
    *((name, 0) for name in ("max_tokens", "repetition_context", "n", "top_p", "repetition_penalty")),
    ("min_p", 1.0),
    ("top_p", 1.0000001),
    ("repetition_penalty", 0.0099),
    ("logprobs", 101),
    ("prompt_logprobs", 101),
    ("n", 129),
    *(("ignore_eos", value) for value in (0, 1, None, "false")),
    *((name, value) for name in LISTS for value in (None, 5, b"text", {"a": 1}, [None], [[]], [True], [1.5])),
    *((name, "text") for name in LISTS if name != "stop"),
    *(("stop", value) for value in ("", [""], ["ok", ""], [1], [b"bytes"])),
    *((name, np.array(5)) for name in LISTS),
    ("stop_token_ids", [5] * (MAX_STOP_TOKENS + 1)),
    ("stop", np.array([1])),
    ("max_tokens", np.array([1, 2])),
    *(("stop_token_ids", value) for value in (["1"], [HUGE])),
    *(("logits_processors", value) for value in (abs, ["abs"], [abs, 1])),
    *(("logit_bias", value) for value in (None, 5, "text", [(1, 1.0)], {HUGE: 1.0}, {"1": 1.0}, {True: 1.0})),
    *(("structured", value) for value in (5, 1.5, True, "yaml", ["a"], ())),
    *(("tools", value) for value in (5, None, "text", {"a": 1}, b"x")),
    *(("tool_choice", value) for value in (5, None, "", "weather", True, ["auto"])),
    *(("parallel_tool_calls", value) for value in (0, 1, None, "no")),
    *(("logit_bias", {1: value}) for value in (math.nan, math.inf, -math.inf, HUGE, 1.1e9, "1", None, True)),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda v: repr(v)[:20])
def test_a_wrong_value_is_refused_with_its_name_and_range(name: str, value: Any) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name} is ") and message.endswith(f", but must be {RANGES[name]}")
    shown = message.removeprefix(f"{name} is ").removesuffix(f", but must be {RANGES[name]}")
    if not isinstance(value, np.generic | np.ndarray):
        assert repr(value).startswith(shown.removesuffix("..."))
    assert len(message) < 300


def test_a_number_too_long_to_print_is_refused_all_the_same() -> None:
    assert refusal(max_tokens=10**5000).startswith("max_tokens is an integer of more than 4000 digits, but must be")


def test_a_long_list_does_not_make_a_long_message() -> None:
    assert len(refusal(stop=["a" * 50] * 1000 + [""])) < 300


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        ((1000,), "1000"),
        ((5, 7000, 1, 10**6), "7000 and 1 more like it"),
        (range(3000), "1000 and 1,999"),
    ],
)
def test_ids_that_the_vocabulary_does_not_have_are_named_among_those_that_it_has(ids: Any, shown: str) -> None:
    for name, value in (("stop_token_ids", ids), ("logit_bias", dict.fromkeys(ids, 1.0))):
        message = refusal(**{name: value})
        wanted = RANGES[name].replace("2147483647", "999")
        assert message.startswith(f"{name} names the token id {shown}") and message.endswith(f"must be {wanted}")


def test_without_a_vocabulary_token_ids_are_only_bounded_below() -> None:
    SamplingParams(stop_token_ids=[2**31 - 1], logit_bias={2**31 - 1: 1.0})
    with pytest.raises(InvalidRequest, match="stop_token_ids names the token id -1, but must be"):
        SamplingParams(stop_token_ids=[-1])


def test_a_wrong_value_is_refused_when_parameters_are_made_or_changed() -> None:
    with pytest.raises(InvalidRequest, match="temperature is -1"):
        SamplingParams(temperature=-1)
    with pytest.raises(InvalidRequest, match="temperature is -1"):
        dataclasses.replace(SamplingParams(), temperature=-1)


EXTREMES: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1},
    {"max_tokens": 2**31 - 1},
    {"max_tokens": None},
    {"temperature": 5e-324},
    {"temperature": 100},
    {"temperature": 1, "top_p": 5e-324},
    {"temperature": 1, "top_p": 1},
    {"temperature": 1, "top_k": 2**31 - 1},
    {"temperature": 1, "top_k": 999},
    {"temperature": 1, "min_p": 5e-324},
    {"temperature": 1, "min_p": 0.9999999999999999},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 100, "repetition_context": 2**31 - 1},
    {"presence_penalty": 100, "frequency_penalty": -100},
    {"temperature": 1e-300, "logit_bias": {0: 1e9, 999: -1e9}, "repetition_penalty": 0.01, "frequency_penalty": -100},
    {"temperature": 100, "logit_bias": dict.fromkeys(range(1000), -1e9), "top_p": 0.5, "min_p": 0.5},
    {"temperature": 1, "seed": -(2**63)},
    {"temperature": 1, "seed": 2**64 - 1},
    {"logprobs": 0},
    {"logprobs": 100},
    {"stop": ["\x00", "\ud800", "x" * (MAX_STOP_CHARACTERS - 2)]},
    {"stop": ["x"] * MAX_STOPS},
    {"stop_token_ids": [0, 999]},
    {"logits_processors": [lambda tokens, logits: logits * 1e6], "repetition_penalty": 0.01},
    {"n": 128, "priority": -(2**31) + 1},
]


@pytest.mark.parametrize("extreme", EXTREMES, ids=lambda e: repr(e)[:40])
def test_extremes_pass_and_the_sampler_copes(extreme: dict[str, Any]) -> None:
    params = SamplingParams(**extreme)
    params.validate(1000)
    logits = np.random.default_rng(0).normal(0, 30, (1, 1000)).astype(np.float32)
    sampler = BatchSampler([SamplingRow(params, params.seed or 0, [1, 2, 3], [0, 4])], 1000)
    for index in range(3):
        drawn = sampler(mx.array(logits), np.array([index]))
        assert 0 <= drawn.tokens.item() < 1000
    adjusted = np.array(sampler._apply_changes(mx.array(logits)))
    assert np.isfinite(adjusted).all()


def test_numbers_of_numpy_become_plain_ones() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int64(3),  # type: ignore[arg-type]
        seed=np.uint64(2**64 - 1),  # type: ignore[arg-type]
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        stop=np.array(["a", "b"]),  # type: ignore[arg-type]
        logit_bias={np.int32(5): np.float64(1.5)},
    )
    params.validate(10)
    assert params == SamplingParams(
        temperature=0.5, top_k=3, seed=2**64 - 1, stop_token_ids=[1, 2], stop=["a", "b"], logit_bias={5: 1.5}
    )
    assert type(params.top_k) is type(params.seed) is type(params.stop_token_ids[0]) is int
    assert type(params.temperature) is type(params.logit_bias[5]) is float


def test_lists_and_maps_of_any_kind_are_read_once_and_copied() -> None:
    def ends() -> Iterator[str]:
        yield "a"
        yield "b"

    bias, ids = {1: 2.0}, [3]
    params = SamplingParams(stop=ends(), stop_token_ids=ids, logit_bias=MappingProxyType(bias))  # type: ignore[arg-type]
    bias[1], ids[0] = math.nan, -1
    params.validate(10)
    params.validate(10)
    assert params.stop == ("a", "b") and params.stop_token_ids == (3,) and dict(params.logit_bias) == {1: 2.0}


def test_one_stop_string_is_a_list_of_one() -> None:
    params = SamplingParams(stop="\n\n")
    assert params == SamplingParams(stop=["\n\n"]) and params.stop == ("\n\n",)


@pytest.mark.parametrize(
    ("stops", "said"),
    [
        (["x" * (MAX_STOP_CHARACTERS + 1)], "1 strings of 16,385 characters"),
        (["x"] * (MAX_STOPS + 1), "1,025 strings of 1,025 characters"),
        (["q" * 5_000_000], "1 strings of 5,000,000 characters"),
        ([f"stop{i}" for i in range(20_000)], "20,000 strings of 168,890 characters"),
    ],
)
def test_stop_strings_have_a_bound_that_is_named_with_the_numbers(stops: list[str], said: str) -> None:
    assert refusal(stop=stops) == (
        f"stop has {said} together, but must have at most 1,024 of 16,384: leave some out, or use stop_token_ids"
    )


def test_functions_are_what_they_are() -> None:
    """Compared and hashed as the objects they are, copied and replaced along."""
    params = SamplingParams(logits_processors=[max, no_change])  # type: ignore[list-item]
    assert params.logits_processors == (max, no_change)
    for twin in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params, n=1)):
        assert twin == params and hash(twin) == hash(params)
    assert dataclasses.replace(params, logits_processors=[no_change]) != params


def test_parameters_know_functions_of_arrays_without_importing_mlx() -> None:
    program = "import sys; from cortexmlx import SamplingParams; SamplingParams(logits_processors=[max]).validate()"
    done = subprocess.run([sys.executable, "-c", f"{program}; sys.exit('mlx' in sys.modules)"], check=False)
    assert done.returncode == 0


def test_nobody_can_change_parameters_behind_the_engine() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={1: 1.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        params.logit_bias[1] = 2.0  # type: ignore[index]
    with pytest.raises(TypeError):
        params.stop[0] = "b"  # type: ignore[index]


VALID = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1, exclude_max=True),
    logit_bias=st.dictionaries(st.integers(0, 999), st.floats(-1e9, 1e9), max_size=3),
    stop=st.lists(st.text(min_size=1), max_size=3),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
)


@given(VALID)
def test_parameters_are_values(params: SamplingParams) -> None:
    params.validate(1000)
    for twin in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert twin == params and hash(twin) == hash(params)


def test_the_best_of_fewer_than_n_is_refused() -> None:
    assert "best_of is 2, but must be an integer in 3..128" in refusal(n=3, best_of=2)
    SamplingParams(n=3, best_of=3).validate()


def test_nothing_is_generated_only_where_the_prompt_is_scored() -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    params.validate()
    assert params.only_scores and not SamplingParams(prompt_logprobs=0).only_scores
    wanted = "max_tokens is -1, but must be an integer in 0..2147483647 or None"
    assert refusal(max_tokens=-1, prompt_logprobs=0) == wanted
    assert refusal(max_tokens=0, prompt_logprobs=0, n=2) == "n is 2, but must be an integer in 1..1 (max_tokens is 0)"
