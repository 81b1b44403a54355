"""Faults of a disk tier whose blocks are kept in parts, by workers: what is not on all ranks, or not there any more."""

from __future__ import annotations

from tests.faults.planted import Fault

GROUP, RANK = "cortexmlx/distributed/disk/group_store.py", "cortexmlx/distributed/disk/rank_store.py"
INDEXES, PART = "cortexmlx/distributed/disk/group_store.py", "cortexmlx/distributed/disk/rank_store.py"
WIRE, RANKS, SERVER = (
    "cortexmlx/distributed/wire/messages.py",
    "cortexmlx/distributed/wire/ranks.py",
    "cortexmlx/distributed/rank_server.py",
)
MODEL, RECOVERY = "cortexmlx/distributed/hosted_model.py", "cortexmlx/core/recovery.py"
STATES = "cortexmlx/execution/states.py"

TESTS = (
    "distributed/wire/test_disk.py",
    "distributed/disk/test_rank_indexes.py",
    "distributed/disk/test_part_identity.py",
    "distributed/disk/test_rank_store.py",
    "distributed/disk/test_group_store.py",
    "distributed/wire/test_ranks.py",
    "distributed/test_rank_server.py",
    "execution/test_states.py",
    "distributed/test_engine_disk.py",
    "distributed/test_engine_disk_lost.py",
)
"""The tests that judge these faults."""

FAULTS = (
    Fault("a piece is there if some rank has it", INDEXES, "return all(name in parts", "return any(name in parts"),
    Fault(
        "what left a disk is still there", INDEXES, "self._parts[rank].difference_update", "self._parts[rank].update"
    ),
    Fault("ranks share the parts in a folder", WIRE, "+ rank.to_bytes(1", "+ (0).to_bytes(1"),
    Fault("the longest read of all ranks counts", GROUP, "count = min(read.counts", "count = max(read.counts"),
    Fault(
        "the first rank that has read is enough", GROUP, "if len(read.counts) < len(self._ranks.channels):", "if False:"
    ),
    Fault(
        "one rank's identity is that of all", GROUP, 'blake2b(b"".join(identities)', 'blake2b(b"".join(identities[:1])'
    ),
    Fault("a rank without identity is left out", GROUP, "if len(identities) < len(answers):", "if not identities:"),
    Fault("a piece exists if some part does", GROUP, "return [all(parts) for parts", "return [any(parts) for parts"),
    Fault("a refusal of one rank is passed over", GROUP, "        if refusals:\n", "        if len(refusals) > 1:\n"),
    Fault(
        "a full disk does not stop the others",
        GROUP,
        "self._no_copies_until = time.monotonic() + PAUSE_SECONDS",
        "pass",
    ),
    Fault("a full disk is told each time", GROUP, "self._warned.add(rank)", "pass"),
    Fault("parts that were not written count as written", GROUP, "        if not told.why:\n", "        if True:\n"),
    Fault("what waits is never less", GROUP, "self._waiting[rank] -= told.bytes", "pass"),
    Fault("a slow rank is asked again at once", GROUP, "        if told.slow:\n", "        if False:\n"),
    Fault("ranks keep what nobody needs", GROUP, "self._later(self._drop_reads)", "pass"),
    Fault("ranks drop what is about to be loaded", GROUP, "RankPiece(number, index, held)", "RankPiece(number, index)"),
    Fault("others' writes are never seen", GROUP, "self._send_quietly(LookAgain())", "pass"),
    Fault(
        "a lost group ends a plan",
        GROUP,
        "            self._ranks.send(asks)\n        except HostLost as lost:",
        "            self._ranks.send(asks)\n        except ZeroDivisionError as lost:",
    ),
    Fault(
        "reads of lost workers arrive",
        GROUP,
        "            read.limit.cancel()\n        self._reads.clear()\n",
        "            read.limit.cancel()\n",
    ),
    Fault(
        "a read that a rank never ends is awaited for ever", GROUP, "            timer.start()\n", "            pass\n"
    ),
    Fault(
        "what is written beside a refusal was never counted",
        GROUP,
        "        refusals = [answer for",
        "            self._waiting[rank] *= not any(isinstance(each, Refused) for each in answers)\n"
        "        refusals = [answer for",
    ),
    Fault(
        "a rank's store has a limit of its own",
        GROUP,
        "def _ask(self, asks: AnyCall, seconds: float | None = None)",
        "def _ask(self, asks: AnyCall, seconds: float | None = 60.0)",
    ),
    Fault(
        "what a forgotten step loaded is held",
        SERVER,
        "                self._given = None\n                self._runner.forget()",
        "                self._runner.forget()",
    ),
    Fault(
        "a read goes on after what is missing",
        RANK,
        "                    break\n                right.append",
        "                    continue\n                right.append",
    ),
    Fault("parts of any shape are taken", RANK, "or not fits(record, group, shapes)", ""),
    Fault("what was dropped is held all the same", RANK, "if asks.number in self._open:", "if True:"),
    Fault("an index is told once", RANK, "        self._on_look()\n        size", "        size"),
    Fault("a prompt comes before the index", RANK, "            self._looked.wait(OPENING_SECONDS)\n", ""),
    Fault(
        "each question waits for the index",
        RANK,
        "            self._looked.wait(OPENING_SECONDS)\n",
        "        self._looked.wait(OPENING_SECONDS)\n",
    ),
    Fault(
        "an index that another process holds is empty",
        RANK,
        "self._told if keys is None else set(keys)",
        "set(keys or ())",
    ),
    Fault("a part that is not there is loaded", RANK, "or piece.index >= len(read):", "and piece.index >= len(read):"),
    Fault("what was refused waits for ever", RANK, "if there and not accepted:", "if False:"),
    Fault("weights are compared again and again", PART, "and self._hashed and not self._why", "and self._hashed"),
    Fault(
        "a rank is told by a call what it tells by itself",
        RANKS,
        "if message[:1] != _UNASKED or not self._was_told(rank, message):",
        "if True:",
    ),
    Fault(
        "a rank that does not answer in time is waited for",
        RANKS,
        'raise self._ended(HostLost("some worker has not',
        'raise (HostLost("some worker has not',
    ),
    Fault(
        "a rank carries out the names of parts",
        SERVER,
        "return plan if not plan.loads else self._disk.with_parts(plan)",
        "return plan",
    ),
    Fault(
        "the index is not asked again",
        MODEL,
        "            self.disk.restart(self._pieces)\n            self.begin_store()\n",
        "            self.disk.restart(self._pieces)\n",
    ),
    Fault("the old store is asked on", MODEL, "            self.disk.restart(self._pieces)\n", ""),
    Fault("what lost workers had read is loaded", RECOVERY, "core.scheduler.forget_loads()", "pass"),
    Fault("a stage without states has no snapshots", STATES, "if self.leaves else Batch((), 1)", ""),
)
