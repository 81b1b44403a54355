"""PlanDigest: a hash over the plans of all steps, which must be the same at the controller and at every rank."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from cortexmlx.distributed.channel import Message
from cortexmlx.distributed.wire.messages import encode_plan
from cortexmlx.kv.spec import Counts
from cortexmlx.kv.step import GroupStep
from cortexmlx.scheduling.plan import StepPlan


class PlanDigest:
    """Takes each step as it was sent or received. After every so many steps, it also takes the whole plan as it is
    carried out, with the block tables in force and the size of the arena.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._hash = hashlib.blake2b(digest_size=16)
        self._steps = 0
        self._groups: tuple[GroupStep, ...] | None = None

    def add(self, message: Message) -> None:
        """Take the message that brings a plan."""
        self._hash.update(message)

    def take(self, plan: StepPlan, blocks: Counts) -> bytes | None:
        """Take a step that begins on an arena of so many blocks. Return the hash of everything so far if it is to be
        compared now.
        """
        self._steps += 1
        if plan.groups is not None:
            self._groups = plan.groups
        if self._steps % self._every:
            return None
        self._hash.update(encode_plan(replace(plan, groups=self._groups)))
        self._hash.update(repr(blocks).encode())
        return self._hash.digest()
