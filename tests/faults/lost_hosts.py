"""Faults of an engine whose model is in workers: memory that some rank does not have, losses that are met wrongly."""

from __future__ import annotations

from tests.faults.planted import Fault

PARTS, RECOVERY = "cortexmlx/distributed/group.py", "cortexmlx/core/core.py"
MODEL, GROUP = "cortexmlx/distributed/hosted_model.py", "cortexmlx/distributed/group.py"
CORE, SWITCHES = "cortexmlx/core/core.py", "cortexmlx/distributed/group.py"

TESTS = (
    "distributed/test_parts.py",
    "distributed/test_switches.py",
    "distributed/test_group.py",
    "distributed/test_hosted_model.py",
    "core/test_recovery.py",
)
"""The tests that judge these faults."""

FAULTS = (
    Fault("the last rank decides on blocks", PARTS, "min(count, max_blocks.get(window, count))", "count"),
    Fault("the richest rank decides on snapshots", PARTS, "min(snapshots) if", "max(snapshots) if"),
    Fault(
        "a stage lacks the groups of others",
        PARTS,
        "rank_layers.get(spec, ())) for spec in specs)",
        "rank_layers[spec]) for spec in rank_layers)",
    ),
    Fault(
        "workers of one machine have all of it each",
        MODEL,
        "info.memory_bytes // workers_per_machine[machine]",
        "info.memory_bytes",
    ),
    Fault(
        "a loss that a step has met is met again", MODEL, "if core.recovery.open and epoch ==", "if epoch or epoch =="
    ),
    Fault("a loss in the middle of a plan ends the plan", MODEL, "except HostLost:", "except HostRefused:"),
    Fault("other weights are not noticed", GROUP, "info.identity != self._loaded.identity", "not info.identity"),
    Fault("workers that are not there are told", GROUP, "if len(rank_memory) < len(self.names):", "if False:"),
    Fault("debug runs compare as seldom", GROUP, "compare_every=read_compare_interval(),", ""),
    Fault(
        "nobody says when a worker hangs",
        GROUP,
        "self._limits = read_hang_limits()",
        "self._limits = type(read_hang_limits())()",
    ),
    Fault(
        "replicated weights count for each worker", MODEL, "infos[0].whole_bytes", "sum(i.weight_bytes for i in infos)"
    ),
    Fault("any seconds will do", SWITCHES, "math.isfinite(seconds) and seconds >= 0", "True"),
    Fault("plans are never compared", SWITCHES, " and int(text[:9]) > 0", ""),
    Fault("hosts that do not fit are tried again", GROUP, "except HostLost as lost:", "except CortexError as lost:"),
    Fault(
        "waiting requests fail with the running ones", RECOVERY, "scheduler.jobs if job.is_running]", "scheduler.jobs]"
    ),
    Fault("running requests are kept in their rows", RECOVERY, "core.scheduler.restart_rows()", "pass"),
    Fault("a request that ends its worker begins again", RECOVERY, "else self._consecutive_losses + 1", "else 1"),
    Fault(
        "the old workers are asked on",
        CORE,
        "        self.runner = self.model.runner\n        self.cache.states",
        "        self.cache.states",
    ),
)
