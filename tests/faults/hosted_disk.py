"""Faults of a disk tier whose blocks are kept in parts, by workers: what is not on all ranks, or not there any more."""

from __future__ import annotations

from tests.faults.planted import Fault

GROUP, RANK = "cortexmlx/hosts/disk/group_store.py", "cortexmlx/hosts/disk/rank_store.py"
INDEXES, PART = "cortexmlx/hosts/disk/rank_indexes.py", "cortexmlx/hosts/disk/part_identity.py"
WIRE, RANKS, SERVER = "cortexmlx/hosts/wire/disk.py", "cortexmlx/hosts/wire/ranks.py", "cortexmlx/hosts/rank_server.py"
MODEL, RECOVERY = "cortexmlx/serving/hosted/hosted_model.py", "cortexmlx/serving/hosted/recovery.py"
STATES = "cortexmlx/execution/memory/states.py"

TESTS = (
    "hosts/wire/test_disk.py",
    "hosts/disk/test_rank_indexes.py",
    "hosts/disk/test_part_identity.py",
    "hosts/disk/test_rank_store.py",
    "hosts/disk/test_group_store.py",
    "hosts/wire/test_ranks.py",
    "execution/memory/test_states.py",
    "hosts/test_engine_disk.py",
    "hosts/test_engine_disk_lost.py",
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
        'their loads are forgotten."""\n        self._reads.clear()',
        'their loads are forgotten."""',
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
    Fault("a prompt comes before the index", RANK, "        self._looked.wait(OPENING_SECONDS)\n", ""),
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
