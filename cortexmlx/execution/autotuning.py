"""Chooses which kernels compute attention and quantized products, by timing them before an engine takes requests."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import mlx.core as mx

from cortexmlx.attention.autotuning import apply_choices, attention_jobs, current_identity, fixed_jobs
from cortexmlx.attention.backends import AttentionBackend
from cortexmlx.attention.decode_methods import probe_layer_shapes
from cortexmlx.autotune.chooser import SECONDS, Autotuner
from cortexmlx.autotune.table import ChoiceTable
from cortexmlx.execution.boundary import Runner
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.products.autotuning import OURS, ProductChoices, product_jobs
from cortexmlx.stats import TimedChoice

_log = logging.getLogger(__name__)

TIMING_VARIABLE = "CORTEXMLX_TIMED_CHOICE"
"""The environment variable that switches timing off ("0"), or on also where it is off ("1")."""


def should_time(backend: AttentionBackend) -> bool:
    """Return whether an opening engine times the candidates: by default only on an Apple GPU.

    Not on a CPU. There the rules of the reference path were measured (bench/LEDGER.md), and a choice by time would let
    tokens depend on what else the machine does.
    """
    switch = os.environ.get(TIMING_VARIABLE)
    return switch == "1" or (switch != "0" and backend.name == "metal" and bool(mx.default_device() == mx.gpu))


def choose_kernels(
    runner: Runner,
    backend: AttentionBackend,
    max_rows: int,
    max_context: int,
    *,
    reproducible: bool = False,
    seconds: float = SECONDS,
    ignore_table: bool = False,
    has_waiters: Callable[[], bool] = lambda: False,
) -> tuple[TimedChoice, ...]:
    """Choose what computes a model's attention and quantized products, by timing the candidates, and return the
    choices. With `reproducible`, nothing is timed: attention gets its defaults. Attention is timed for single
    tokens in steps of up to `max_rows` rows that see up to `max_context` tokens. See `Autotuner.choose` for the other
    arguments.

    If anything fails, the rules choose. They also do for a model that runs on mlx-lm's own caches.
    """
    choosing_backend = backend.selectable
    if choosing_backend is None or not isinstance(runner, ModelRunner):
        return ()
    runner.set_attention(choosing_backend.attend)
    chooser, deadline = Autotuner(ChoiceTable(current_identity())), time.perf_counter() + seconds
    try:
        layers = probe_layer_shapes(runner.model, runner.arena)
        if reproducible:
            for job in fixed_jobs(layers, choosing_backend):
                chooser.choose_default(job)
        else:
            jobs = attention_jobs(layers, choosing_backend, max_rows, max_context)
            chooser.choose(jobs.values(), seconds=seconds, ignore_table=ignore_table, has_waiting=has_waiters)
            apply_choices(choosing_backend, jobs, chooser)
            dtype = next((layer.dtype for layer in layers.values()), "float32")
            remaining_seconds = max(0.0, deadline - time.perf_counter())
            _choose_products(
                runner, chooser, dtype, max_rows, remaining_seconds, ignore_table=ignore_table, has_waiters=has_waiters
            )
    except Exception:
        _log.warning("the rules choose what computes attention, since timing failed", exc_info=True)
    finally:
        mx.clear_cache()
    return chooser.choices()


def keep_own_products(runner: Runner) -> None:
    """Let the model's own modules multiply with quantized weights wherever timing would have to decide."""
    products = runner.products if isinstance(runner, ModelRunner) else None
    if products is not None and isinstance(products.use, ProductChoices):
        products.remove()


def _choose_products(
    runner: ModelRunner,
    chooser: Autotuner,
    dtype: str,
    max_rows: int,
    seconds: float,
    *,
    ignore_table: bool,
    has_waiters: Callable[[], bool],
) -> None:
    """Choose what multiplies with quantized weights. If our kernel is never chosen, leave the model's modules alone."""
    products = runner.products
    if products is None or not isinstance(products.use, ProductChoices):
        return
    jobs = product_jobs(products, dtype, max_rows)
    chooser.choose(jobs.values(), seconds=seconds, ignore_table=ignore_table, has_waiting=has_waiters)
    own_kernel_keys = [
        key for key, job in jobs.items() if chooser.chosen_candidate(job.key) == OURS and products.approves(*key)
    ]
    products.use.set_classes(own_kernel_keys)
    if not own_kernel_keys:
        products.remove()
