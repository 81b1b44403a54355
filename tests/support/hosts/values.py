"""Values of any type that is sent between hosts, drawn as the type's annotations say, and whether two are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from msgspec import Struct

from cortexmlx import errors
from cortexmlx.disk.tier import PieceLoad
from cortexmlx.distributed.messages import SentPlan, to_sent_plan
from cortexmlx.errors import CortexError, HostLost, InvalidRequest
from cortexmlx.scheduling.plan import SamplingRow, StepPlan
from cortexmlx.types.sampling_params import SamplingParams

ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CortexError)]
_INTS = st.one_of(st.integers(-3, 300), st.integers(-(2**63), 2**64 - 1))
_NUMBERS = st.integers(0, 2**31)
_TOKENS = st.lists(st.integers(-1, 2**31 - 1), max_size=40)
_PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.0, 2.0),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    top_k=st.integers(0, 50),
    min_p=st.floats(0.0, 1.0, exclude_max=True),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    repetition_context=st.integers(1, 30),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, 300), st.floats(-100.0, 100.0), max_size=3),
    logprobs=st.none() | st.integers(0, 5),
)
_SPECIAL: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: _INTS,
    float: st.floats(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    NoneType: st.none(),
    range: st.builds(range, _INTS, _INTS),
    tuple[PieceLoad, ...]: st.just(()),
    SamplingRow: st.builds(SamplingRow, _PARAMS, st.integers(-(2**63), 2**64 - 1), _TOKENS, _TOKENS),
    CortexError: st.builds(lambda kind, text: kind(text), st.sampled_from(ERRORS), st.text(max_size=20))
    | st.builds(HostLost, st.text(max_size=9), host=st.none() | st.text(max_size=9))
    | st.builds(InvalidRequest, st.text(max_size=9), field=st.none() | st.text(max_size=9)),
}


@cache
def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type."""
    if kind in _SPECIAL:
        return _SPECIAL[kind]
    if hasattr(kind, "__supertype__"):
        return values(kind.__supertype__)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return st.one_of([values(arg) for arg in args])
    if origin is np.ndarray:
        return _array(np.dtype(get_args(args[1])[0]).name)
    if origin in (list, Sequence) or (origin is tuple and args[-1] is Ellipsis):
        return st.lists(values(args[0]), max_size=3).map(list if origin is list else tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if origin is Mapping:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    if kind is SentPlan:
        return values(StepPlan).map(to_sent_plan)
    if kind is StepPlan:
        drawn = values_of_fields(kind)
        return drawn.map(lambda plan: replace(plan, logit_segments=tuple(s for s in plan.segments if s.logits)))
    return values_of_fields(kind)


def values_of_fields(kind: Any) -> st.SearchStrategy[Any]:
    """Objects of a class whose fields have values of their types."""
    names = kind.__struct_fields__ if issubclass(kind, Struct) else [field.name for field in fields(kind)]
    hints = get_type_hints(kind)
    # Not `builds`, which follows the annotations by itself.
    return st.tuples(*(values(hints[name]) for name in names)).map(lambda given: kind(*given))


def _array(dtype: str) -> st.SearchStrategy[Any]:
    return arrays.arrays(np.dtype(dtype), arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))


def same(a: Any, b: Any) -> bool:
    """Whether two values are the same. Lists and tuples may be; NaN is NaN."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, SamplingParams):
        return bool(a == b)
    if isinstance(a, CortexError):
        return type(a) is type(b) and str(a) == str(b) and vars(a) == vars(b)
    if is_dataclass(a) or isinstance(a, Struct):
        names = a.__struct_fields__ if isinstance(a, Struct) else [field.name for field in fields(a)]
        return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in names)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Sequence) and not isinstance(a, str | bytes | range):
        return isinstance(b, Sequence) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (a != a and b != b)
