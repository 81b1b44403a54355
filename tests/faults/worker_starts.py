"""Faults of starting and ending workers: what outlives its group, what shows a key, what is said of a lost worker."""

from __future__ import annotations

from tests.faults.planted import Fault

SUPERVISOR, PROCESSES = "cortexmlx/hosts/launch/supervisor.py", "cortexmlx/hosts/launch/processes.py"
LAUNCHER, ADDRESSES = "cortexmlx/hosts/launch/launcher.py", "cortexmlx/hosts/launch/addresses.py"
ASSIGNMENT, GROUP = "cortexmlx/hosts/launch/assignment.py", "cortexmlx/hosts/worker_group.py"
WORKER = "cortexmlx/hosts/worker.py"
SPEC, PLAN = "cortexmlx/hosts/spec.py", "cli/planning/hosts.py"

TESTS = (
    "hosts/launch/test_supervisor.py",
    "hosts/launch/test_assignment.py",
    "hosts/launch/test_launcher.py",
    "hosts/launch/test_addresses.py",
    "hosts/launch/test_processes.py",
    "hosts/test_spec.py",
    "hosts/test_worker.py",
    "hosts/test_worker_group.py",
    "cli/planning/test_hosts.py",
)
"""The tests that judge these faults."""

FAULTS = (
    Fault("a supervisor ends nothing", SUPERVISOR, "with suppress(OSError):\n        _end_family()", "pass"),
    Fault("who ignores SIGTERM lives on", SUPERVISOR, "_send(pid, signal.SIGKILL)", "_send(pid, signal.SIGTERM)"),
    Fault("only children are ended", SUPERVISOR, "below |= more", "below |= more; break"),
    Fault("orphans live on", SUPERVISOR, "_adopt_orphans()\n    try:", "try:"),
    Fault(
        "a supervisor leaves files",
        SUPERVISOR,
        "ignore_errors=True)\n    return 0 if",
        "onerror=print) if 0 else 0\n    return 0 if",
    ),
    Fault("Ctrl-C reaches the workers", PROCESSES, "start_new_session=True", "start_new_session=False"),
    Fault("a key is kept in the output", PROCESSES, '.replace(self._key, "...")', ""),
    Fault("a long line is kept", PROCESSES, ".strip()[-_LINE_CHARACTERS:]", ".strip()"),
    Fault("escapes are kept", PROCESSES, 'c if c.isprintable() else " " for c', "c for c"),
    Fault("launchers' words are the workers'", PROCESSES, "inside = not inside", "inside = False"),
    Fault("a key on a command line", GROUP, "[task.variable()]", '[task.variable(), f"KEY={key.hex()}"]'),
    Fault("one epoch for all", GROUP, "self.epoch += 1", "self.epoch = 1"),
    Fault("a lost host has no name", GROUP, "next(iter(ended), lost.host)", "None"),
    Fault("the launcher's order before the links'", GROUP, "lost.host if lost.host in ended else next", "next"),
    Fault("another rank's end is told of this one", GROUP, "lost if host == lost.host else", "lost if True else"),
    Fault("who ended because of others is blamed", PROCESSES, "if code != str(CONTROLLER_LOST) and", "if"),
    Fault("whom the launcher ended is blamed", PROCESSES, "(place and code in _BY_THE_LAUNCHER)", "False"),
    Fault("a worker fails when its controller is lost", WORKER, "return CONTROLLER_LOST", "raise"),
    Fault("every lost host is the controller", WORKER, "if link.lost is None:", "if False:"),
    Fault("a key of any length", ASSIGNMENT, "if len(key) == KEY_BYTES:", "if True:"),
    Fault("each worker takes all cores", LAUNCHER, "str(max(1, cores // here))", "str(cores)"),
    Fault("ports that are taken", LAUNCHER, "continue\n            return first", "pass\n            return first"),
    Fault("a name of ssh's configuration is no host", ADDRESSES, "return said[0] if said else plain", "return plain"),
    Fault("addresses that need an interface", ADDRESSES, '"%" not in address and not', "True or not"),
    Fault("an option is a host", SPEC, 'or ssh.startswith("-") ', ""),
    Fault("a ring without addresses", SPEC, "if not host.ips:", "if False:"),
    Fault("ranks of MPI in the file's order", SPEC, 'if chosen == "mpi":', "if False:"),
    Fault(
        "a plan forgets quantized keys", PLAN, "quantized(caches_of(part, dtype)[1], *kv)", "caches_of(part, dtype)[1]"
    ),
    Fault("a plan gives each host all layers", PLAN, "if layer in layers)", ")"),
)
