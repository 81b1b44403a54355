"""Faults of starting and ending workers: what outlives its group, what shows a key, what is said of a lost worker."""

from __future__ import annotations

from tests.faults.planted import Fault

SUPERVISOR, PROCESSES = "cortexmlx/distributed/launch/supervisor.py", "cortexmlx/distributed/launch/processes.py"
LAUNCHER, ADDRESSES = "cortexmlx/distributed/launch/processes.py", "cortexmlx/distributed/launch/processes.py"
ASSIGNMENT, GROUP = "cortexmlx/distributed/launch/assignment.py", "cortexmlx/distributed/worker_group.py"
LAUNCH = "cortexmlx/distributed/launch/mlx_launch.py"
WORKER = "cortexmlx/distributed/worker.py"
SPEC, PLAN = "cortexmlx/distributed/spec.py", "cli/planning/hosts.py"

TESTS = (
    "distributed/launch/test_supervisor.py",
    "distributed/launch/test_assignment.py",
    "distributed/launch/test_launcher.py",
    "distributed/launch/test_mlx_launch.py",
    "distributed/launch/test_addresses.py",
    "distributed/launch/test_processes.py",
    "distributed/test_spec.py",
    "distributed/test_worker.py",
    "distributed/test_worker_group.py",
    "cli/planning/test_hosts.py",
)
"""The tests that judge these faults."""

FAULTS = (
    Fault("a supervisor ends nothing", SUPERVISOR, "with suppress(OSError):\n        _end_descendants()", "pass"),
    Fault(
        "who ignores SIGTERM lives on",
        SUPERVISOR,
        "_send_signal(pid, signal.SIGKILL)",
        "_send_signal(pid, signal.SIGTERM)",
    ),
    Fault("only children are ended", SUPERVISOR, "family_pids |= new_pids", "family_pids |= new_pids; break"),
    Fault("orphans live on", SUPERVISOR, "_adopt_orphans()\n    try:", "try:"),
    Fault(
        "a supervisor leaves files",
        SUPERVISOR,
        "ignore_errors=True)\n    if code is",
        "onerror=print) if 0 else 0\n    if code is",
    ),
    Fault("Ctrl-C reaches the workers", PROCESSES, "start_new_session=True", "start_new_session=False"),
    Fault("a key is kept in the output", PROCESSES, '.replace(self._key, "...")', ""),
    Fault("a long line is kept", PROCESSES, ".strip()[-_LINE_CHARACTERS:]", ".strip()"),
    Fault("escapes are kept", PROCESSES, 'c if c.isprintable() else " " for c', "c for c"),
    Fault("launchers' words are the workers'", PROCESSES, "inside = not inside", "inside = False"),
    Fault(
        "a key on a command line", GROUP, "[task.environment_entry()]", '[task.environment_entry(), f"KEY={key.hex()}"]'
    ),
    Fault("one epoch for all", GROUP, "self.epoch += 1", "self.epoch = 1"),
    Fault("a lost host has no name", GROUP, "next(iter(exit_reasons), error.host)", "None"),
    Fault(
        "the launcher's order before the links'", GROUP, "error.host if error.host in exit_reasons else next", "next"
    ),
    Fault("another rank's end is told of this one", GROUP, "error if host == error.host else", "error if True else"),
    Fault("who ended because of others is blamed", PROCESSES, "if code != str(CONTROLLER_LOST) and", "if"),
    Fault("whom the launcher ended is blamed", PROCESSES, "(is_later and code in _LAUNCHER_EXIT_CODES)", "False"),
    Fault("a shell reads the temporary folder's name", PROCESSES, "shlex.quote(temp_folder) == temp_folder", "True"),
    Fault("a worker that ended with 0 is awaited", LAUNCH, 'names["log"] = log_rank_exits(names["log"])', "pass"),
    Fault("the ring hides the cause", PROCESSES, "elif _RING.match(text):", "elif False:"),
    Fault("a cause that the ring began is hidden", PROCESSES, "*)+($|Socket|", "*)+(|Socket|"),
    Fault("the ring alone is not told", PROCESSES, "list(self._ring_lines) or launchers", "launchers"),
    Fault(
        "few lines of many are looked at", PROCESSES, "complete_lines[-_LINES_LOOKED_AT:]", "complete_lines[-_LINES:]"
    ),
    Fault("a traceback of the launcher is the workers'", PROCESSES, "self._tracebacks += 1", "pass"),
    Fault("a traceback of the launcher never ends", PROCESSES, "self._tracebacks -= 1", "pass"),
    Fault("two tracebacks of the launcher mix", PROCESSES, "self._tracebacks -= 1", "self._tracebacks = 0"),
    Fault("a rank's end hides in a traceback", PROCESSES, " or _LAUNCHERS.search(text)):", "):"),
    Fault(
        "whom a failing launcher ended is blamed",
        PROCESSES,
        "index > 0 or self.launcher_failure is not None",
        "index > 0",
    ),
    Fault(
        "a launcher that fails later is the cause",
        PROCESSES,
        "if self.launcher_failure is None and not any(self._reported_exits()):",
        "if self.launcher_failure is None:",
    ),
    Fault("an ended launcher is not told", GROUP, "if processes.launcher_signal is not None:", "if False:"),
    Fault(
        "a launcher's exit code is a signal", PROCESSES, "number = -code if code < 0 else code - 128", "number = code"
    ),
    Fault("a terminated supervisor is not told", SUPERVISOR, "return 128 + number if number else 0", "return 0"),
    Fault("a failed launcher is not told", GROUP, "if processes.launcher_failure is not None:", "if False:"),
    Fault(
        "a worker is blamed when the controller was stopped",
        GROUP,
        "if any(rank < num_ranks and ended_by_worker(rank) for rank in processes.orphaned_ranks()):",
        "if False:",
    ),
    Fault(
        "links that were ended here tell of a stop",
        GROUP,
        "rank < num_ranks and ended_by_worker(rank) for",
        "rank < num_ranks for",
    ),
    Fault(
        "a launcher's end comes before a worker's",
        GROUP,
        "None if exit_reasons else _external_cause",
        "_external_cause",
    ),
    Fault("a worker fails when its controller is lost", WORKER, "return CONTROLLER_LOST", "raise"),
    Fault("every lost host is the controller", WORKER, "if link.loss_reason is None:", "if False:"),
    Fault("a key of any length", ASSIGNMENT, "if len(key) == KEY_BYTES:", "if True:"),
    Fault("each worker takes all cores", LAUNCHER, "str(max(1, cores // local_ranks))", "str(cores)"),
    Fault("ports that are taken", LAUNCHER, "continue\n            return first", "pass\n            return first"),
    Fault(
        "a name of ssh's configuration is no host",
        ADDRESSES,
        "return host_names[0] if host_names else host_name",
        "return host_name",
    ),
    Fault("addresses that need an interface", ADDRESSES, '"%" not in address and not', "True or not"),
    Fault("an option is a host", SPEC, 'or ssh.startswith("-") ', ""),
    Fault("a ring without addresses", SPEC, "if not host.ips:", "if False:"),
    Fault("ranks of MPI in the file's order", SPEC, 'if chosen_backend == "mpi":', "if False:"),
    Fault(
        "a plan forgets quantized keys",
        PLAN,
        "quantize_groups(probe_caches(part, dtype)[1], *kv)",
        "probe_caches(part, dtype)[1]",
    ),
    Fault("a plan gives each host all layers", PLAN, "if layer in layers)", ")"),
)
