"""Parts of a model that send what they computed to the next rank.

mlx-lm's pipelines let the keys of their last cache depend on what they sent: whoever evaluates the keys sends it. Our
caches have no keys. In a part that sends, they have a place for it instead, and whoever runs a step evaluates that.
Without it, a step that needs no logits would never send, and the next rank would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Sender:
    """A cache's place for what a part sent. It is there in parts that send (`let_send`)."""

    sends = False
    sent: mx.array | None = None
    """It can be evaluated when the step's results have been sent; None in all other caches, and between steps."""

    @property
    def keys(self) -> mx.array:
        """What the model makes depend on the sending."""
        if not self.sends:
            raise AttributeError("keys")
        return mx.zeros((1,), mx.int32)

    @keys.setter
    def keys(self, after: mx.array) -> None:
        if not self.sends:
            raise AttributeError("keys")
        self.sent = after


def let_send(model: nn.Module, leaves: Iterable[Any]) -> None:
    """Give the caches of a model's part the place, if the part sends."""
    if any(getattr(module, "pipeline_rank", 0) for _, module in model.named_modules()):
        for leaf in leaves:
            if isinstance(leaf, Sender):
                leaf.sends = True


def take_sent(leaves: Iterable[Any]) -> list[mx.array]:
    """Return what must be evaluated so that a step's results are sent, once."""
    sent = []
    for leaf in leaves:
        if isinstance(leaf, Sender) and leaf.sent is not None:
            sent.append(leaf.sent)
            leaf.sent = None
    return sent
