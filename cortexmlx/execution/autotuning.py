"""Chooses what computes a model's jobs, before its engine takes requests."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import mlx.core as mx

from cortexmlx.attention.autotuning import attention_jobs, fixed_jobs, identity_here, take_choices
from cortexmlx.attention.backends import Backend
from cortexmlx.attention.decode_methods import layers_of
from cortexmlx.autotune.chooser import SECONDS, Chooser
from cortexmlx.autotune.table import ChoiceTable
from cortexmlx.execution.boundary import Runner
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.products.autotuning import OURS, ProductChoices, product_jobs
from cortexmlx.stats import TimedChoice

_log = logging.getLogger(__name__)

SWITCH = "CORTEXMLX_TIMED_CHOICE"
"""The environment variable that switches timing off ("0"), or on also where it is off ("1")."""


def times_at_opening(backend: Backend) -> bool:
    """Return whether candidates are timed when an engine opens: on an Apple GPU.

    Not on a CPU. There the rules of the reference path were measured (bench/LEDGER.md), and a choice by time would let
    tokens depend on what else the machine does.
    """
    switch = os.environ.get(SWITCH)
    return switch == "1" or (switch != "0" and backend.name == "metal" and bool(mx.default_device() == mx.gpu))


def choose(
    runner: Runner,
    backend: Backend,
    max_rows: int,
    longest: int,
    *,
    reproducible: bool = False,
    seconds: float = SECONDS,
    again: bool = False,
    waiting: Callable[[], bool] = lambda: False,
) -> tuple[TimedChoice, ...]:
    """Choose for each kind of layer what computes its single tokens in steps of up to `max_rows` rows that see up to
    `longest` tokens, and what multiplies with quantized weights. Return the choices. See `Chooser.decide` for the other
    arguments.

    If anything fails, the rules choose. They also do for a model that runs on mlx-lm's own caches.
    """
    choosing = backend.choosing
    if choosing is None or not isinstance(runner, ModelRunner):
        return ()
    runner.attend_by(choosing.attend)
    chooser, until = Chooser(ChoiceTable(identity_here())), time.perf_counter() + seconds
    try:
        layers = layers_of(runner.model, runner.arena)
        if reproducible:
            for job in fixed_jobs(layers, choosing):
                chooser.fix(job)
        else:
            jobs = attention_jobs(layers, choosing, max_rows, longest)
            chooser.decide(jobs.values(), seconds=seconds, again=again, waiting=waiting)
            take_choices(choosing, jobs, chooser)
            dtype = next((layer.dtype for layer in layers.values()), "float32")
            left = max(0.0, until - time.perf_counter())
            _choose_products(runner, chooser, dtype, max_rows, left, again=again, waiting=waiting)
    except Exception:
        _log.warning("the rules choose what computes attention, since timing failed", exc_info=True)
    finally:
        mx.clear_cache()
    return chooser.choices()


def leave_products(runner: Runner) -> None:
    """Let MLX multiply with quantized weights, by the model's own modules, if that is what a time decides."""
    products = runner.products if isinstance(runner, ModelRunner) else None
    if products is not None and isinstance(products.use, ProductChoices):
        products.remove()


def _choose_products(
    runner: ModelRunner,
    chooser: Chooser,
    dtype: str,
    max_rows: int,
    seconds: float,
    *,
    again: bool,
    waiting: Callable[[], bool],
) -> None:
    """Choose what multiplies with a model's quantized weights. If that is never our kernel, the model's own modules are
    left alone.
    """
    products = runner.products
    if products is None or not isinstance(products.use, ProductChoices):
        return
    jobs = product_jobs(products, dtype, max_rows)
    chooser.decide(jobs.values(), seconds=seconds, again=again, waiting=waiting)
    ours = [key for key, job in jobs.items() if chooser.chosen(job.key) == OURS and products.approves(*key)]
    products.use.take(ours)
    if not ours:
        products.remove()
