"""Counts the Python calls for one more token: `python -m cortexmlx.bench.studies.token_path [MODEL]`.

It counts the files, functions and calls of this project in one step of `EngineCore`. The step is a later step of a
decode window on reference attention. It contains its plan, its dispatch and the tokens of the step before. Calls inside
mlx and mlx-lm do not count, nor do the constructors that `dataclass` generates. A call costs the host about 0.1
microseconds, and costs a reader one more thing to know.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass
from types import FrameType

from cortexmlx.cpu import blas

blas.preload()  # before mlx is imported

from cortexmlx import SamplingParams  # noqa: E402
from cortexmlx.core.config import EngineConfig  # noqa: E402
from cortexmlx.core.core import EngineCore  # noqa: E402
from cortexmlx.core.handle import RequestHandle  # noqa: E402
from cortexmlx.core.text import StopConditions  # noqa: E402
from cortexmlx.scheduling.plan import StepKind  # noqa: E402
from cortexmlx.types.request import QueuedRequest, RequestId  # noqa: E402

PROMPT = 20
WARM_UP = 8
"""Steps before the counted one, which is inside a decode window and has another step in flight."""

Function = tuple[str, str]
"""A function: the path of its file, and its name."""


@dataclass(frozen=True)
class TokenPath:
    """The Python functions called in one decode step of `rows` rows, and how often."""

    rows: int
    calls: Counter[Function]

    @property
    def file_count(self) -> int:
        """The number of source files with a function that is called."""
        return len({file for file, _ in self.calls})

    def __str__(self) -> str:
        return f"{self.rows:>4} {self.file_count:>7} {len(self.calls):>11} {self.calls.total():>7}"


def count_step_calls(model: str, rows: int, *, drafts: bool = False) -> TokenPath:
    """Count the calls of one decode step with `rows` rows. With `drafts`, speculation and forced tokens are on."""
    options = {"max_rows": rows, "prefill_budget": 4096, "speculate": drafts, "forced_tokens": drafts}
    core = EngineCore(EngineConfig(model, attention="reference", **options))  # type: ignore[arg-type]
    try:
        params = SamplingParams(max_tokens=3 * WARM_UP, ignore_eos=True, temperature=0.0)
        for row in range(rows):
            prompt = tuple(range(row + 1, row + 1 + PROMPT))
            request = QueuedRequest(prompt, params, row, time.perf_counter())
            core.add(request, RequestHandle(RequestId(row), core.cancel), StopConditions())
        for _ in range(WARM_UP):
            core.step()
        calls = _profile_step(core)
        plan = core._in_flight[-1]
        assert plan.kind is StepKind.DECODE and plan.groups is None and len(plan.segments) == rows
        return TokenPath(rows, calls)
    finally:
        core.release()


def _profile_step(core: EngineCore) -> Counter[Function]:
    """Run one step, and return the calls of this program's functions in it."""
    calls: Counter[Function] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        is_ours = frame.f_globals.get("__name__", "").startswith("cortexmlx.")
        if event == "call" and is_ours and frame.f_code.co_filename != "<string>":
            calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        core.step()
    finally:
        sys.setprofile(None)
    return calls


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    print("rows   files   functions   calls")
    for count in (1, 16):
        print(count_step_calls(name, count))
