"""What is sent of a sampling row is all that the sampler reads of it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.distributed.wire.codec import codec
from cortexmlx.errors import HostLost, InvalidRequest
from cortexmlx.execution.sampling import BatchSampler
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import SamplingRow
from cortexmlx.types.sampling_params import SamplingParams
from support.effort import examples
from support.hosts.values import values

VOCABULARY, LIKELY = 301, 11


@settings(max_examples=examples(40))
@given(
    st.lists(values(SamplingRow), min_size=1, max_size=3),
    st.integers(0, 9),
)
def test_rows_choose_the_same_tokens_after_they_were_sent(rows: list[SamplingRow], dice: int) -> None:
    rows = [
        SamplingRow(row.params, row.seed, *([abs(t) % LIKELY for t in part] for part in (row.prompt, row.output)))
        for row in rows
    ]
    sent = [codec(SamplingRow).decode(bytes(codec(SamplingRow).encode(row))) for row in rows]
    numbers = np.random.default_rng(dice).normal(0, 0.5, (len(rows), VOCABULARY)).astype(np.float32)
    numbers[:, :LIKELY] += 4  # what the texts have is likely, so that a penalty decides
    logits = mx.array(numbers)
    index = np.array([len(row.output) for row in rows])
    own, other = BatchSampler(rows, VOCABULARY), BatchSampler(sent, VOCABULARY)
    for step in range(3):  # penalties also count what was chosen before
        a, b = own(logits, index + step), other(logits, index + step)
        for x, y in zip(a.arrays(), b.arrays(), strict=True):
            assert np.array_equal(np.array(x), np.array(y), equal_nan=x.dtype == mx.float32)


def test_a_plain_row_takes_a_few_bytes_however_long_its_text_is() -> None:
    row = SamplingRow(SamplingParams(stop=["x"], max_tokens=9), 7, list(range(4000)), list(range(4000)))
    assert len(codec(SamplingRow).encode(row)) <= 6


def test_parameters_out_of_range_are_refused() -> None:
    hot = bytearray(codec(SamplingRow).encode(SamplingRow(SamplingParams(temperature=1.0), 7, (), ())))
    at = hot.index(bytes.fromhex("000000000000f03f"))
    hot[at : at + 8] = bytes.fromhex("000000000000f07f")  # infinity
    with pytest.raises(HostLost, match="temperature"):
        codec(SamplingRow).decode(bytes(hot))


def test_functions_cannot_be_sent() -> None:
    row = SamplingRow(SamplingParams(), 7, (), (), processed_for=JobId(3))
    with pytest.raises(InvalidRequest, match="logits_processors"):
        codec(SamplingRow).encode(row)
