"""Servers with a scripted model, and homes for their clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.clients.home import Home
from support.clients.scripted import Answer, write_scripted
from support.clients.served import Served, served

Serving = Callable[[Answer], Served]


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted(tmp_path_factory.mktemp("scripted") / "model")


@pytest.fixture
def serving(scripted: Path) -> Iterator[Serving]:
    """Start a server whose model writes what a script says."""
    with ExitStack() as stack:
        yield lambda answer: stack.enter_context(served(scripted, answer))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)
