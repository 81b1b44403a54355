"""A KVCache of one sequence whose keys and values are in mlx-lm's own caches. No mlx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.prefix import Match
from cortexmlx.kv.sizing import sequence_bytes
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.kv.step import BlockCopy

_COUNTED = (LayerGroup(KVSpec(0, 0, 0, "float32"), ()),)
"""The one group of blocks: no layer keeps anything in them."""


class OneSequence(KVCache):
    """A `KVCache` whose blocks only count tokens, and in which nobody has any while a sequence begins.

    What is cached is what the last sequence left, for only its tokens are kept. A sequence that begins like it takes
    that over: `rewind(tokens)` brings what is kept back to the first `tokens` tokens, or says that it cannot; then the
    sequence begins with nothing, and `rewind(0)` forgets everything. `kept` is what the model's layers keep.
    """

    def __init__(
        self,
        kept: Sequence[LayerGroup],
        blocks: int,
        block_size: int,
        *,
        rewind: Callable[[int], bool],
        **options: Any,
    ) -> None:
        super().__init__(_COUNTED, blocks, block_size, **options)
        self.needs_ends = True  # not all caches can be cut back
        self._kept = tuple(kept)
        self._rewind = rewind

    @property
    def grows(self) -> bool:
        """Its caches take memory for every token, whatever the blocks that count them do."""
        return True

    @property
    def bytes_limit(self) -> int:
        """Bytes of the longest sequence."""
        return sequence_bytes(self._kept, self.capacity_tokens)

    def allocate_for(
        self, seq: int, tokens: int, headroom: int = 0, match: Match | None = None, loaded: int = 0
    ) -> tuple[BlockCopy, ...]:
        """Begin a sequence in the place of the last one, with what of `match` is still there. There is nothing to
        copy. Raises KVCacheFull; then what is kept has not changed.
        """
        super().allocate_for(seq, tokens, headroom, match)
        self.let_go_sources()  # nothing is copied: a source that is held would stay cached when its text is gone
        if not self._rewind(self.length(seq)):
            assert match is not None
            self.free(seq)
            self._rewind(0)
            super().allocate_for(seq, tokens, headroom, replace(match, entries=(), partial=None, partial_tokens=0))
        self.drop_cached()
        return ()
