"""Faults of what crosses between the controller and its workers, and of refusals on some ranks."""

from __future__ import annotations

from tests.faults.planted import Fault

WIRE, DIGEST = "cortexmlx/distributed/messages.py", "cortexmlx/distributed/messages.py"
RANKS, SERVER = "cortexmlx/distributed/remote_runner.py", "cortexmlx/distributed/rank_server.py"
OVERDUE = "cortexmlx/distributed/overdue.py"
REMOTE, RUNNER = "cortexmlx/distributed/remote_runner.py", "cortexmlx/execution/runner.py"
MODEL, STATES = "cortexmlx/distributed/hosted_model.py", "cortexmlx/execution/states.py"

TESTS = (
    "distributed/test_messages.py",
    "distributed/test_plan_digest.py",
    "distributed/test_overdue.py",
    "distributed/test_ranks.py",
    "distributed/test_rank_server.py",
    "execution/test_runner.py",
    "execution/test_states.py",
    "distributed/test_hosted_model.py",
    "distributed/test_remote_runner.py",
)
"""The tests that judge these faults."""

FAULTS = (
    Fault("an array's size is believed", WIRE, "if math.prod(shape) * dtype.itemsize != len(data):", "if False:"),
    Fault("an array's shape is believed", WIRE, "or not all(type(dim) is int and dim >= 0 for dim in shape)", ""),
    Fault(
        "a message may go on",
        WIRE,
        "class _Message(Struct, frozen=True, forbid_unknown_fields=True,",
        "class _Message(Struct, frozen=True,",
    ),
    Fault("an array of another type is read", WIRE, "if name != number.__name__:", "if False:"),
    Fault("an error of any class is made", WIRE, "if name not in _CLASSES:", "if False:"),
    Fault("an array of any dtype is sent", WIRE, "if value.dtype not in _DTYPES:", "if False:"),
    Fault(
        "penalties see the output alone",
        WIRE,
        "num_prompt_tokens = max(0, last - len(row.output))",
        "num_prompt_tokens = last and 0",
    ),
    Fault(
        "penalties see the last tokens alone",
        WIRE,
        "\n    return row.prompt[-num_prompt_tokens:] if num_prompt_tokens else (), row.output\n",
        "\n    return row.prompt[-num_prompt_tokens:] if num_prompt_tokens else (), row.output[-9:]\n",
    ),
    Fault("what needs no logits has some", WIRE, "[segment for segment in segments if segment.logits]", "segments"),
    Fault("the tables of a window do not count", DIGEST, "self._groups = plan.groups", "pass"),
    Fault("the size of an arena does not count", DIGEST, "self._hash.update(repr(blocks).encode())", "pass"),
    Fault(
        "a missing digest is passed over",
        RANKS,
        "if answer.digest != (None",
        "if answer.digest and answer.digest != (None",
    ),
    Fault("an old answer is taken for the new one", RANKS, "if answer.number == number:", "if True:"),
    Fault("a call that was half sent is forgotten", RANKS, "        self._is_sending = True\n", ""),
    Fault(
        "the neighbour of a dead rank is blamed",
        RANKS,
        "(not is_own_error and self._lost_rank_error()) or copy_error",
        "copy_error",
    ),
    Fault(
        "how a dead rank ended is not waited for",
        RANKS,
        "_TOLD_SECONDS if is_loss_known else",
        "_CAUSE_SECONDS if is_loss_known else",
    ),
    Fault(
        "a loss that is nobody's is a rank's",
        RANKS,
        "error.host if isinstance(error, HostLost) else self.names[rank]",
        "self.names[rank]",
    ),
    Fault("who waits for a stopped rank hangs", RANKS, "each.silent_seconds > _SILENT_SECONDS for", "False for"),
    Fault("a failed rank goes on", SERVER, "if self._failure is not None:", "if False:"),
    Fault(
        "a refusal within a pass is an answer",
        SERVER,
        "if isinstance(answer, Refusal):\n        raise",
        "if False:\n        raise",
    ),
    Fault("every rank gets the mask", REMOTE, "[Choose(mask)] + [Choose(None)] *", "[Choose(mask)] + [Choose(mask)] *"),
    Fault("nothing is prepared", REMOTE, "if self._changes_arena(plan):", "if False:"),
    Fault("what others were granted stays", REMOTE, "None if state.blocks == blocks else Resize(blocks)", "None"),
    Fault(
        "a half-written arena stays",
        REMOTE,
        "key=lambda refused: refused.is_resize",
        "key=lambda refused: not refused.is_resize",
    ),
    Fault(
        "the arena of rank 0 decides",
        REMOTE,
        "return tuple(map(min, zip(*(state.blocks for state in self.ranks), strict=True)))",
        "return self.ranks[0].blocks",
    ),
    Fault("one rank's word is enough to grow", REMOTE, "return all(self._ask", "return any(self._ask"),
    Fault("one look is enough", OVERDUE, "is_late and of.suspected_call == oldest_call", "is_late"),
    Fault("a pause does not count", OVERDUE, "start_time - times.last_answer_time <= PAUSE_SECONDS", "True"),
    Fault(
        "one step tells how long steps take", OVERDUE, "times.count >= MIN_SAMPLES * len(self._ranks)", "times.count"
    ),
    Fault("small steps tell how long large ones take", OVERDUE, "each > kind >= 0)", "each >= 0)"),
    Fault("large steps tell nothing of small ones", OVERDUE, "(each == kind or each > kind >= 0)", "each == kind"),
    Fault("large steps have no more time than small ones", OVERDUE, "max(smaller_step_times, default=0.0)", "0.0"),
    Fault(
        "a slow step is remembered for ever",
        OVERDUE,
        "times.longest_seconds * _FADES ** (1 / len(self._ranks))",
        "times.longest_seconds",
    ),
    Fault(
        "the longest time is forgotten at once",
        OVERDUE,
        "times.longest_seconds * _FADES ** (1 / len(self._ranks))",
        "0.0",
    ),
    Fault("a call is late before its turn", OVERDUE, "max(self.open[0][2], self.last_answer_time)", "self.open[0][2]"),
    Fault("a context is no work", OVERDUE, "(_LENGTH + each.first + each.count)", "_LENGTH"),
    Fault("what moves much must be quick", OVERDUE, "return _MOVES if moves else _SMALL", "return _SMALL"),
    Fault(
        "a model must be opened soon",
        OVERDUE,
        "case Open() | Close():\n                return None",
        "case Open() | Close():\n                return _MOVES",
    ),
    Fault("who waits is blamed", OVERDUE, "sorted(\n            (seconds, rank)", "sorted((-seconds, rank)"),
    Fault(
        "somebody is blamed in any case",
        OVERDUE,
        "return rank if lowest <= _IDLE * second_lowest and second_lowest >= _BUSY * self.seconds else None",
        "return rank",
    ),
    Fault("who has answered is blamed, too", OVERDUE, "if self._ranks[rank].open[0][0] == oldest_call]", "]"),
    Fault("a stage without states has no snapshots", STATES, "if self.leaves else StateBatch((), 1)", ""),
    Fault("a disk tier is ignored in silence", MODEL, "() if config.kv_store is None else (NOT_STORED,)", "()"),
    Fault("a step is prepared twice", RUNNER, "if plan is not self._prepared_plan:", "if True:"),
)
