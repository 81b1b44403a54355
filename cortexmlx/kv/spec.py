"""What a layer keeps for each token: the shape, the dtype and how far back it looks. No mlx here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVSpec:
    """The KV memory of one attention layer.

    `kv_heads` heads keep a key of `key_dim` and a value of `value_dim` numbers of `dtype` ("float32", "float16",
    "bfloat16") for every token. `window` None attends to all earlier tokens; w attends to the w newest, the token
    itself included. Layers with equal specs form one group and share block tables.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    window: int | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return {"float32": 4, "float16": 2, "bfloat16": 2}[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes one layer keeps for one token: `(Dk + Dv) * kv_heads * itemsize`."""
        return (self.key_dim + self.value_dim) * self.kv_heads * self.itemsize


@dataclass(frozen=True)
class LayerGroup:
    """The layers that share one spec, and so one set of block tables. `layers` index the model's cache list."""

    spec: KVSpec
    layers: tuple[int, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that all layers of the group keep for one token."""
        return self.spec.bytes_per_token * len(self.layers)


def group_layers(specs: list[KVSpec]) -> tuple[LayerGroup, ...]:
    """Group layer indices by equal spec, in the order in which the specs first appear."""
    members: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        members.setdefault(spec, []).append(layer)
    return tuple(LayerGroup(spec, tuple(layers)) for spec, layers in members.items())
