"""One rank's part of a model, and the runner that computes its share of every step.

All ranks do the same in the same order. `open_rank` enters no collective, so a rank that cannot load its part leaves no
other waiting. `make_runner` enters the first ones, when all parts are known to be loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx

from cortexmlx.attention.backends import AttentionBackend
from cortexmlx.attention.probe import NotPaged, probe_kv_specs
from cortexmlx.attention.selfcheck import KernelCheck
from cortexmlx.distributed.messages import RankInfo, RankOptions, ShardingMode
from cortexmlx.errors import HostRefused
from cortexmlx.execution.autotuning import choose_kernels
from cortexmlx.execution.execution_modes import PagedMode
from cortexmlx.execution.runner import ModelRunner
from cortexmlx.execution.shared_choice import SharedSampler
from cortexmlx.kv.spec import LayerGroup, group_layers, paged_groups, quantize_groups
from cortexmlx.models.loaded import LoadedModel, check_logits
from cortexmlx.models.sharding import CutMode, load_part
from cortexmlx.system.machine import working_set_bytes

log = logging.getLogger("cortexmlx")

_SHARDING_WAYS = {
    ShardingMode.AUTO: (CutMode.TENSOR, CutMode.PIPELINE),
    ShardingMode.TENSOR: (CutMode.TENSOR,),
    ShardingMode.PIPELINE: (CutMode.PIPELINE,),
}


class OpenedRank:
    """A rank's part of a model, loaded, from which the rank's runner is made."""

    def __init__(
        self,
        info: RankInfo,
        loaded: LoadedModel,
        backend: AttentionBackend,
        options: RankOptions,
        group: mx.distributed.Group,
    ) -> None:
        self.info = info
        self._loaded, self._backend = loaded, backend
        self._options, self._group = options, group

    def make_runner(self, groups: Sequence[LayerGroup]) -> ModelRunner:
        """Check the model and make the runner of this part, whose arena has no blocks yet. `groups` are those of all
        ranks, in one order, with this rank's layers in each: it may have none of some group. Every rank must call
        it: it computes one token to check the model. Raises ModelCorrupt for NaN logits.
        """
        loaded, options, backend = self._loaded, self._options, self._backend
        check_logits(loaded)
        runner = ModelRunner(
            loaded.model,
            paged_groups(groups),
            options.block_size,
            self.info.vocab_size,
            backend.attend,
            backend.writer,
            make_sampler=partial(SharedSampler, self._group),
        )
        if backend.writer is not None:
            _run_kernel_checks(backend.writer.kernel_checks(loaded.model))
        if options.reproducible and backend.selectable is not None:
            backend.selectable.choices.reproducible = True
            choose_kernels(runner, backend, options.max_rows, loaded.context_length, reproducible=True)
        return runner


def open_rank(options: RankOptions, group: mx.distributed.Group) -> OpenedRank:
    """Load this rank's part of a model, on the thread that will run it.

    Raises HostRefused for a model that cannot be cut for so many ranks, or that runs on mlx-lm's own caches, and
    whatever `load_model` raises.
    """
    part = load_part(
        options.model,
        group,
        _SHARDING_WAYS[options.cut],
        adapter=options.adapter,
        dequantize=options.dequantize,
    )
    loaded = part.loaded
    try:
        groups = quantize_groups(group_layers(probe_kv_specs(loaded.model)), options.kv_bits, options.kv_group_size)
    except NotPaged as why:
        raise HostRefused(f"{loaded.name} cannot run on several hosts: {why}") from why
    mode = PagedMode(loaded.model, groups)
    backend = mode.choose_backend(options.attention)
    if options.reproducible:  # as in an engine of one process
        backend = replace(backend, writer=None)
    _run_kernel_checks(mode.kernel_checks(backend, options.block_size))
    info = RankInfo(
        groups=mode.groups,
        vocab_size=int(loaded.model(mx.zeros((1, 1), mx.int32)).shape[-1]),  # nothing is computed
        context_length=loaded.context_length,
        weight_bytes=loaded.weight_bytes,
        parameters=loaded.parameters,
        dtype=loaded.dtype,
        name=loaded.name,
        architecture=str(loaded.config.get("model_type", "unknown")),
        notes=loaded.notes + mode.notes,
        identity=loaded.identity,
        memory_bytes=working_set_bytes(),
        backend=backend.name,
        whole_bytes=part.whole_bytes,
        whole_parameters=part.whole_parameters,
    )
    return OpenedRank(info, loaded, backend, options, group)


def _run_kernel_checks(checks: Sequence[KernelCheck]) -> None:
    """Compile and check kernels. One that cannot be checked now is checked at its first use."""
    for check in checks:
        try:
            check.run()
        except Exception:
            log.exception("attention (%s) could not be checked, and is checked at its first use", check.label)
