"""The engine's options: said once, and refused where they are out of range."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from cortexmlx.core.config import EngineConfig
from cortexmlx.engine import Engine
from cortexmlx.errors import InvalidRequest


def test_the_engine_takes_the_options_of_its_configuration_with_their_defaults() -> None:
    signature = inspect.signature(Engine.__init__).parameters
    theirs = [(p.name, p.default, p.annotation) for p in signature.values() if p.name not in ("self", "model")]
    ours = [(f.name, f.default, f.type) for f in fields(EngineConfig) if f.name != "model"]
    assert theirs == ours


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"block_size": 12}, "block_size is 12, but must be one of"),
        ({"max_rows": 0}, "max_rows is 0, but must be at least 1"),
        ({"max_rows": 1.5}, "max_rows is 1.5"),
        ({"prefill_budget": 0}, "prefill_budget is 0, but must be at least 1 token"),
        ({"max_request_tokens": 1}, "max_request_tokens is 1, but must be at least 2 tokens or None"),
        ({"client_tokens": 0}, "client_tokens is 0"),
        ({"token_target": 0}, "token_target is 0, but must be more than 0 seconds"),
        ({"keep_last": 0}, "keep_last is 0, but must be at least 1 token or None"),
        ({"keep_first": -1, "keep_last": 5}, "keep_first is -1, but must be at least 0 tokens or None"),
        ({"keep_first": 4}, "keep_first is 4, but must be None without keep_last"),
        ({"kv_memory": "lots"}, "'lots' is not a size"),
        ({"kv_bits": 6}, r"kv_bits is 6, but must be one of \(8, 4\) or None"),
        ({"kv_bits": 8, "kv_group_size": 128}, r"kv_group_size is 128, but must be one of \(64, 32\), with kv_bits"),
        ({"hosts": 0}, "hosts is 0, but must be a number, a host file's path or None"),
        ({"hosts": " "}, "hosts is ' '"),
        ({"hosts": True}, "hosts is True"),
        ({"resume_lost": 1}, "resume_lost is 1, but must be True or False"),
        ({"hosts": 2, "draft": "a model"}, "draft is 'a model', but must be None with hosts"),
        ({"kv_group_size": 64}, "kv_group_size is 64, but must be one of .*, with kv_bits"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        EngineConfig("a model", **bad)


def test_memory_is_read_as_people_write_it() -> None:
    assert EngineConfig("a model", kv_memory="4GB").kv_bytes == 4_000_000_000
    assert EngineConfig("a model", kv_memory=4096).kv_bytes == 4096
    assert EngineConfig("a model").kv_bytes is None


def test_numbers_of_numpy_become_pythons_own() -> None:
    options: dict[str, Any] = {"block_size": np.int64(16), "max_rows": np.int8(100), "token_target": np.float32(0.5)}
    config = EngineConfig("a model", **options)
    numbers = (config.block_size, 4 * config.max_rows, config.token_target)
    assert numbers == (16, 400, 0.5) and [type(number) for number in numbers] == [int, int, float]


def test_an_engine_names_the_option_that_was_meant() -> None:
    with pytest.raises(TypeError, match=r"no option 'max_row' \(did you mean 'max_rows'\?\): see help\(Engine\)$"):
        Engine("smollm2", max_row=3)  # type: ignore[call-arg]


def test_every_option_says_what_it_means() -> None:
    """Each field is followed by a text."""
    lines = [line.strip() for line in inspect.getsource(EngineConfig).splitlines()]
    for name in inspect.signature(EngineConfig).parameters:
        (at,) = (i for i, line in enumerate(lines) if line.startswith(f"{name}: "))
        assert lines[at + 1].startswith('"""'), name
