"""What the tests share: the fast BLAS where there is one, tiny models written once per session, and their judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from cortexmlx.cpu import blas

blas.preload()

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

Tiny = Callable[[str], Path]
Greedy = Callable[[str, Sequence[int], int], list[int]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A function from a name of `tiny.CONFIGS` to the folder of that model."""
    from support.tiny import write_tiny

    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        path = root / name.replace(" ", "-")
        return path if path.exists() else write_tiny(path, name)

    return folder


@pytest.fixture(scope="session")
def judged(tiny: Tiny) -> Callable[[str], Any]:
    """A function from a name of `tiny.CONFIGS` to mlx-lm's own (model, tokenizer)."""

    @cache
    def load(name: str) -> Any:
        import mlx_lm

        return mlx_lm.load(str(tiny(name)))

    return load


@pytest.fixture(scope="session")
def theirs(judged: Callable[[str], Any]) -> Greedy:
    """mlx-lm's greedy tokens: a function of model name, prompt and number of tokens."""
    from support.judge import greedy

    @cache
    def answer(name: str, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        return greedy(*judged(name), prompt, max_tokens)

    return lambda name, prompt, max_tokens: answer(name, tuple(prompt), max_tokens)
