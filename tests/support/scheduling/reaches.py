"""How far the layers of models see, for tests of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from cortexmlx.kv.spec import AttentionWindow, KVSpec, LayerGroup

ALL = AttentionWindow()
REACHES: list[list[AttentionWindow]] = [
    *(
        [ALL],
        [ALL],
        [ALL, ALL],
        [AttentionWindow(5)],
        [ALL, AttentionWindow(1)],
        [AttentionWindow(12), ALL],
        [AttentionWindow(3), AttentionWindow(20)],
        [AttentionWindow(40), ALL],
    ),
    *(
        [ALL, AttentionWindow(2), AttentionWindow(17)],
        [ALL, AttentionWindow(6, True)],
        [AttentionWindow(16, True)],
        [AttentionWindow(9), AttentionWindow(8, True)],
    ),
]
"""How far the layers of a model see: everything, windows and chunks, smaller and larger than blocks and pieces."""


def groups(reaches: Sequence[AttentionWindow]) -> tuple[LayerGroup, ...]:
    specs = [KVSpec(1, 4 + i, 4, "float32", r.tokens, chunked=r.chunked) for i, r in enumerate(reaches)]
    return tuple(LayerGroup(spec, (i,)) for i, spec in enumerate(specs))
