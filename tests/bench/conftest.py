"""A small random model for the tests of this folder, and an engine on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cortexmlx import Engine
from support.models.bench_model import write_small


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_small(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Engine]:
    with Engine(model, max_rows=4, block_size=8) as engine:
        yield engine
