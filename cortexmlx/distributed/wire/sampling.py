"""Sampling rows as bytes: of parameters and texts only what the sampler reads. Without mlx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np

from cortexmlx.distributed.wire.codec import Codec, Reader, broken, codec, register, write_natural
from cortexmlx.errors import InvalidRequest
from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.types.arrays import TokenList
from cortexmlx.types.sampling_params import SamplingParams

NOT_SENT = frozenset(
    {
        "best_of",
        "ignore_eos",
        "logits_processors",
        "max_thinking_tokens",
        "max_tokens",
        "n",
        "parallel_tool_calls",
        "priority",
        "prompt_logprobs",
        "seed",
        "stop",
        "stop_token_ids",
        "structured",
        "tool_choice",
        "tools",
    }
)
"""The parameters that do not change how a token is chosen from logits. A row has its own seed."""


def sent_kinds(params: type) -> dict[str, Any]:
    """Return the types of all other parameters by their names, so that a new one is sent unless `NOT_SENT` has it.
    Raises TypeError for a type that has no bytes, and for a name in `NOT_SENT` that is no parameter.
    """
    said = {field.name: field.type for field in fields(params)}
    if strange := NOT_SENT - said.keys():
        raise TypeError(f"not sent, and no parameters: {', '.join(sorted(strange))}")
    sent = {name: kind for name, kind in said.items() if name not in NOT_SENT}
    kinds = get_type_hints(SimpleNamespace(__annotations__=sent), {"Mapping": Mapping})
    for name, kind in kinds.items():
        try:
            codec(kind)
        except TypeError as error:
            raise TypeError(f"the sampling parameter {name!r} has no bytes: {error}; or it is NOT_SENT") from None
    return kinds


_DEFAULTS = SamplingParams()
_FIELDS = [
    (1 << bit, name, getattr(_DEFAULTS, name), codec(kind))
    for bit, (name, kind) in enumerate(sent_kinds(SamplingParams).items())
]
_INT32 = np.dtype(np.int32)
_MOST_KEPT = 128
_params_bytes: Codec[bytes] = codec(bytes)
_seed: Codec[int] = codec(int)


def _encoded(params: SamplingParams) -> bytes:
    """Return which parameters differ from the defaults, as bits, and their values."""
    bits, values = 0, bytearray()
    for bit, name, default, part in _FIELDS:
        value = getattr(params, name)
        if value != default:
            bits |= bit
            part.write(values, value)
    out = bytearray()
    write_natural(out, bits)
    return bytes(out + values)


def _decoded(encoded: bytes) -> SamplingParams:
    reader = Reader(encoded)
    bits = reader.natural()
    given = {name: part.read(reader) for bit, name, _, part in _FIELDS if bits & bit}
    reader.end()
    try:
        return SamplingParams(**given)
    except InvalidRequest as error:
        broken(str(error))


_kept = lru_cache(64)(_decoded)
"""Rows of a window mostly have the same parameters, and again in the next window. Checking them takes long."""


def read_by_sampler(row: SamplingRow) -> tuple[TokenList, TokenList]:
    """Return what the sampler reads of a row's prompt and output: the last tokens for a repetition penalty, and the
    whole output for penalties that count. The tests compare the tokens that it chooses with these and with all.
    """
    params = row.params
    last = params.repetition_context if params.repetition_penalty != 1.0 else 0
    missing = max(0, last - len(row.output))
    if not (params.presence_penalty or params.frequency_penalty):
        return row.prompt[-missing:] if missing else (), row.output[-last:] if last else ()
    return row.prompt[-missing:] if missing else (), row.output


def _write_tokens(out: bytearray, tokens: TokenList) -> None:
    write_natural(out, len(tokens))
    out += np.asarray(tokens, _INT32).tobytes()


def _read_tokens(reader: Reader) -> TokenList:
    return np.frombuffer(reader.take(4 * reader.natural()), _INT32)


def _write(out: bytearray, row: SamplingRow) -> None:
    if row.processed_for is not None:
        raise InvalidRequest(
            "logits_processors are functions of this process, and the model runs on hosts: leave them out, or run the "
            "model without hosts",
            field="logits_processors",
        )
    prompt, output = read_by_sampler(row)
    _params_bytes.write(out, _encoded(row.params))
    _seed.write(out, row.seed)
    _write_tokens(out, prompt)
    _write_tokens(out, output)


def _read(reader: Reader) -> SamplingRow:
    encoded = _params_bytes.read(reader)
    params = _kept(encoded) if len(encoded) <= _MOST_KEPT else _decoded(encoded)
    return SamplingRow(params, _seed.read(reader), _read_tokens(reader), _read_tokens(reader))


register(SamplingRow, Codec(_write, _read))
