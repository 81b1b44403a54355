"""What crosses between the engine's core and a runner: refusals are answers, and nothing needs mlx."""

from __future__ import annotations

import subprocess
import sys
import weakref
from typing import Any

import pytest

from cortexmlx.errors import KVBlockError, MemoryRefused
from cortexmlx.execution.boundary import Refused, granted, refusable
from support.refusals import SAID


@pytest.mark.parametrize(
    ("error", "of_arena"),
    [(RuntimeError(SAID), False), (MemoryError("no"), False), (MemoryRefused("the arena stays"), True)],
)
def test_a_refusal_of_memory_is_an_answer(error: Exception, of_arena: bool) -> None:
    @refusable
    def work() -> int:
        raise error

    assert work() == Refused(str(error), of_arena)
    with pytest.raises(MemoryRefused, match=str(error).replace("[", r"\[")):
        granted(work())


@pytest.mark.parametrize("error", [RuntimeError("it broke"), KVBlockError("a slot"), KeyboardInterrupt()])
def test_any_other_error_is_raised(error: BaseException) -> None:
    @refusable
    def work() -> int:
        raise error

    with pytest.raises(type(error)):
        work()


def test_an_answer_is_what_the_work_returns() -> None:
    @refusable
    def work(a: int, *, b: int) -> int:
        return a + b

    assert granted(work(1, b=2)) == 3


def test_a_refusal_keeps_nothing_of_what_was_there_when_it_came() -> None:
    class Large:
        pass

    kept: list[Any] = []

    @refusable
    def work() -> None:
        large = Large()
        kept.append(weakref.ref(large))
        error = MemoryError("no")
        kept.append(error)
        raise error

    work()
    assert kept[0]() is None, "the frames of the error hold it"


def test_the_boundary_needs_no_mlx() -> None:
    code = "import sys, cortexmlx.execution.boundary; sys.exit('mlx' in sys.modules or 'mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0
