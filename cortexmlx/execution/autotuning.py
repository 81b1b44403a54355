"""Chooses which kernels compute attention and quantized matmuls, by timing them before an engine takes requests."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import mlx.core as mx

from cortexmlx.attention.autotuning import (
    apply_chosen_methods,
    apply_prefill_choices,
    attention_jobs,
    current_identity,
    prefill_jobs,
    reproducible_jobs,
)
from cortexmlx.attention.backends import AttentionBackend
from cortexmlx.attention.decode_methods import probe_layer_shapes
from cortexmlx.attention.probe import probe_attention_calls
from cortexmlx.autotune.chooser import SECONDS, Autotuner
from cortexmlx.autotune.job import TuningJob
from cortexmlx.autotune.table import ChoiceTable
from cortexmlx.execution.boundary import Runner
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.matmul.autotuning import OURS, MatmulChoices, RowClass, matmul_jobs
from cortexmlx.matmul.served import QuantizedMatmuls
from cortexmlx.metal.matmul.shape import MatmulShape
from cortexmlx.stats import TimedChoice
from cortexmlx.system.machine import gpu_architecture

_log = logging.getLogger(__name__)

TIMING_VARIABLE = "CORTEXMLX_TIMED_CHOICE"
"""The environment variable that switches timing off ("0"), or on also where it is off ("1")."""


def should_time(backend: AttentionBackend) -> bool:
    """Return whether an engine times the candidate kernels when it opens: by default only on an Apple GPU.

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
    """Choose what computes a model's attention and quantized matmuls, by timing the candidates, and return the
    choices. With `reproducible`, nothing is timed: attention gets its defaults. Attention is timed for pieces of
    prompts, and for single tokens in steps of up to `max_rows` rows that see up to `max_context` tokens. See
    `Autotuner.choose` for the other arguments.

    If anything fails, the rules choose. They also do for a model that runs on mlx-lm's own caches.
    """
    choosing_backend = backend.selectable
    if choosing_backend is None or not isinstance(runner, ModelRunner):
        return ()
    runner.set_attention(choosing_backend.attend)
    chooser = Autotuner(ChoiceTable(current_identity()))
    try:
        layers = probe_layer_shapes(runner.model, runner.arena)
        if reproducible:
            for job in reproducible_jobs(layers, choosing_backend):
                chooser.choose_default(job)
        else:
            attention = attention_jobs(layers, choosing_backend, max_rows, max_context)
            dtype = next((layer.dtype for layer in layers.values()), "float32")
            matmuls = _choosable_matmuls(runner)
            multiplications = {}
            if matmuls is not None:
                matmuls.install(runner.model)  # also what an earlier choice left to MLX
                multiplications = matmul_jobs(matmuls, dtype, gpu_architecture())
            by_kernels, pieces = backend.by_kernels, {}
            if by_kernels is not None:
                calls = ((call, runner.arena.spec(layer)) for layer, call in probe_attention_calls(runner.model))
                pieces = prefill_jobs(calls, by_kernels, runner.arena.block_size)
            # matmuls first: there is most to gain
            jobs = [*multiplications.values(), *pieces.values(), *attention.values()]
            chooser.choose(jobs, seconds=seconds, ignore_table=ignore_table, has_waiting=has_waiters)
            apply_chosen_methods(choosing_backend, attention, chooser)
            if by_kernels is not None:
                apply_prefill_choices(by_kernels, pieces, chooser)
            if matmuls is not None:
                _apply_matmul_choices(matmuls, multiplications, chooser)
    except Exception:
        _log.warning("the rules choose what computes attention, since timing failed", exc_info=True)
    finally:
        mx.clear_cache()
    return chooser.choices()


def use_mlx_matmuls(runner: Runner) -> None:
    """Let MLX compute the quantized matmuls for which timing would choose either MLX or our kernel."""
    if isinstance(runner, ModelRunner) and (matmuls := _choosable_matmuls(runner)) is not None:
        matmuls.keep_shared()


def _choosable_matmuls(runner: ModelRunner) -> QuantizedMatmuls | None:
    """Return the model's QuantizedMatmuls if timing is to choose their kernels; otherwise None."""
    matmuls = runner.matmuls
    return matmuls if matmuls is not None and isinstance(matmuls.use, MatmulChoices) else None


def _apply_matmul_choices(
    matmuls: QuantizedMatmuls, jobs: Mapping[tuple[MatmulShape, RowClass], TuningJob], chooser: Autotuner
) -> None:
    """Let our kernel multiply where it was chosen. If it never was, leave the model's modules alone."""
    kernel_classes = [
        (shape, rows)
        for (shape, rows), job in jobs.items()
        if chooser.chosen_candidate(job.key) == OURS and matmuls.approves(shape, rows.min_rows)
    ]
    assert isinstance(matmuls.use, MatmulChoices)
    matmuls.use.set_classes(kernel_classes)
    if not kernel_classes:
        matmuls.keep_shared()
