"""Records of the disk tier that tests write, read and damage."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cortexmlx.disk.segment_store import SegmentStore
from cortexmlx.disk.segments import Record


def record(number: int, seed: int = 0) -> Record:
    """One of 8 tokens with keys and values of two kinds; another seed, other numbers under the same key."""
    random = np.random.default_rng([number, seed])
    keys = random.standard_normal((2, 3, 8, 4)).astype(np.float32)
    values = random.integers(0, 1 << 16, (2, 3, 8, 2)).astype(np.uint16)
    return Record(key_of(number), tuple(range(number, number + 8)), (keys, values))


def key_of(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def same(one: Record, other: Record) -> bool:
    """Whether two records are alike to the last bit."""
    return (one.key, one.tokens) == (other.key, other.tokens) and [
        (a.dtype, a.shape, a.tobytes()) for a in one.arrays
    ] == [(a.dtype, a.shape, a.tobytes()) for a in other.arrays]


def opened(path: Path, limit: int = 1 << 30) -> SegmentStore:
    segment_store = SegmentStore(path, limit)
    segment_store.open()
    return segment_store


def read_all(segment_store: SegmentStore, records: Sequence[Record]) -> Mapping[bytes, Record]:
    """What a segment store has of some records."""
    places = segment_store.find([r.key for r in records])
    read = {r.key: segment_store.read(places[r.key], r.tokens) for r in records if r.key in places}
    return {key: record for key, record in read.items() if record is not None}
