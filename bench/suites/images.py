"""Measures a model that sees: the wait for an answer about an image, the wait for an answer to a second question about
the image, and how long rows of text wait for a token while an image comes.
"""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np

from cortexmlx.bench.measure.engines import BenchPlan, open_engines
from cortexmlx.bench.measure.machine import BenchMachine
from cortexmlx.bench.measure.prompts import PromptStream
from cortexmlx.bench.report import Report, ReportSection, ReportTable
from cortexmlx.engine import Engine
from cortexmlx.errors import InvalidRequest

SIDE = 1240
"""Pixels of a side of the images: 1,521 tokens in Qwen's models."""

ROWS, PROMPT, TOKENS = 4, 64, 2000
"""The rows of text beside an image, their prompts, and more tokens than they get meanwhile."""

FIRST, SECOND, COMPUTED, GAP, ALONE = (
    "answer about an image",
    "second question about it",
    "its computed tokens",
    "longest gap beside it",
    "longest gap without it",
)


def measure_images(plan: BenchPlan, block_size: int) -> Report:
    """Measure `plan.repetitions` images. Raises InvalidRequest if the model does not see."""
    machine = BenchMachine.detect()
    with ExitStack() as stack:
        needed = ROWS * (PROMPT + TOKENS) + 40_000
        engine = open_engines(plan, stack, [(block_size, needed)], ROWS + 1)[block_size]
        if not engine.sees_images:
            raise InvalidRequest(f"{engine.info.name} sees no images: {'; '.join(engine.info.notes) or 'text only'}")
        prompts, runs = PromptStream(engine.info.vocab_size, plan.seed), list[dict[str, float]]()
        tokens = engine.check_image(_random_image(plan.seed, 0))
        for number in range(plan.repetitions + 1):
            plan.report_progress(f"images, run {number} of {plan.repetitions}")
            run = _ask_twice(engine, _random_image(plan.seed, 2 * number)) | _longest_gaps(
                engine, prompts, _random_image(plan.seed, 2 * number + 1)
            )
            runs += [run] * (number > 0)  # the first compiles kernels
    section = _images_section(runs, tokens)
    return Report(machine, engine.info, section, plan.notes, plan.settings)


def _random_image(seed: int, number: int) -> Any:
    """Return a PIL image of random pixels."""
    from PIL import Image

    return Image.fromarray(np.random.default_rng([seed, number]).integers(0, 256, (SIDE, SIDE, 3), np.uint8))


def _make_question(image: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]}


def _ask_twice(engine: Engine, image: Any) -> dict[str, float]:
    """Return the seconds to the first and the second answer, and how many tokens the second one computed."""
    question, seconds = _make_question(image), []
    for messages in (
        [question],
        [question, {"role": "assistant", "content": "So."}, {"role": "user", "content": "Why?"}],
    ):
        begin = time.perf_counter()
        usage = engine.generate(messages, max_tokens=1, temperature=0).usage
        seconds.append(time.perf_counter() - begin)
    return {FIRST: seconds[0], SECOND: seconds[1], COMPUTED: usage.prompt_tokens - usage.cached_tokens}


def _longest_gaps(engine: Engine, prompts: PromptStream, image: Any) -> dict[str, float]:
    """Return the longest times between two tokens of a text request: without an image, and while one is read."""
    times: list[list[float]] = [[] for _ in range(ROWS)]
    decoding, ended = threading.Event(), threading.Event()

    def listen(row: int) -> Any:
        def on_event(event: Any) -> None:
            times[row].append(time.perf_counter())
            if all(len(each) > 32 for each in times):
                decoding.set()
            if event.finish_reason is not None or event.error is not None:
                ended.set()
                decoding.set()

        return on_event

    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    handles = [engine.submit(list(prompts.next_prompt(PROMPT)), listener=listen(row), **options) for row in range(ROWS)]
    decoding.wait()
    begin = time.perf_counter()
    engine.generate([_make_question(image)], max_tokens=1, temperature=0)
    end = time.perf_counter()
    was_beside = not ended.is_set()
    for handle in handles:
        handle.cancel()
    if not was_beside:
        raise InvalidRequest("the rows of text ended before the answer about the image began: the machine was too busy")
    gaps = [(a, b - a) for row in times for a, b in pairwise(row)]
    start = max(row[8] for row in times)  # all rows decode
    return {
        GAP: max(gap for at, gap in gaps if begin - gap < at < end),
        ALONE: max(gap for at, gap in gaps if start <= at < begin - gap),
    }


def _images_section(runs: list[dict[str, float]], tokens: int) -> ReportSection:
    """Return the report's section on all runs."""
    medians = {name: statistics.median(run[name] for run in runs) for name in (FIRST, SECOND, COMPUTED, GAP, ALONE)}
    rows = []
    for name, median in medians.items():
        values, unit = [run[name] for run in runs], "" if name == COMPUTED else " s"
        digits = "{:,.0f}" if name == COMPUTED else "{:.3f}"
        rows.append(
            (name, digits.format(median) + unit, f"{digits.format(min(values))} to {digits.format(max(values))}")
        )
    return ReportSection(
        "images",
        f"Images of {SIDE:,} x {SIDE:,} pixels, {tokens:,} tokens",
        (ReportTable(("measure", "median", "range"), tuple(rows)),),
        (f"{ROWS} rows of text decode beside an image; the gaps are theirs",),
        tuple({"image_tokens": tokens, **run} for run in runs),
    )
