"""What a worker is told to open, and what it tells about the part that it opened: plain data, without mlx."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cortexmlx.kv.spec import LayerGroup

COMPARE_EVERY = 64
"""After how many steps plans are compared, if nobody asks for another number."""


class Cut(Enum):
    """How a model is cut into parts."""

    AUTO = "auto"
    """Into tensors if its class can be cut so, else into a pipeline."""
    TENSOR = "tensor"
    """Each rank has a part of every layer's weights, and some of its heads."""
    PIPELINE = "pipeline"
    """Each rank has some of the layers."""


@dataclass(frozen=True)
class RankOptions:
    """All that a worker needs to open its part of a model. The fields without a comment are those of `EngineConfig`."""

    model: str
    adapter: str | None
    dequantize: bool | None
    kv_bits: int | None
    kv_group_size: int | None
    block_size: int
    attention: str
    reproducible: bool
    max_rows: int
    prefill_budget: int
    cut: Cut = Cut.AUTO
    compare_every: int = COMPARE_EVERY
    """After how many steps the ranks' plans and block tables are compared. 1 in debug runs."""


@dataclass(frozen=True)
class RankInfo:
    """What a worker tells about its part of a model."""

    groups: tuple[LayerGroup, ...]
    """What its layers keep. `layers` index the caches of the part, and `spec` counts its own heads."""
    vocab_size: int
    context_length: int
    weight_bytes: int
    """Bytes of its own weights in memory."""
    parameters: int
    """Numbers that its own weights stand for."""
    dtype: str
    """The type of the activations."""
    name: str
    architecture: str
    """The model type of config.json."""
    notes: tuple[str, ...]
    """Lines for the user."""
    identity: str
    """Names the content of the model's files: `LoadedModel.identity`."""
    memory_bytes: int
    """Bytes that the weights and the KV cache should use at most on this machine."""
    backend: str
    """The name of what computes attention."""
    whole_bytes: int
    """Bytes that the weights of the whole model would take in memory."""
    whole_parameters: int
    """How many numbers those stand for."""
