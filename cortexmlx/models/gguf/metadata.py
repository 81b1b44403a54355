"""Typed look-ups in a GGUF header. A missing or wrong value is one clear error."""

from __future__ import annotations

from typing import Any

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models.gguf.file import GGUFHeader


class Metadata:
    """Typed look-ups in a GGUF header's metadata. The methods with `arch_` put the architecture's name before the
    key.
    """

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.file = header.path.name
        self.architecture = self.text("general.architecture")

    def _missing(self, key: str) -> ModelCorrupt:
        return ModelCorrupt(f"{self.file} lacks the metadata {key!r}. Convert it again with a current converter.")

    def _wrong(self, key: str, wanted: str) -> ModelCorrupt:
        found = self.header.metadata.get(key)
        shown = f"a list of {len(found)}" if isinstance(found, list) else repr(found)
        return ModelCorrupt(f"{self.file}: the metadata {key!r} is {shown}, not {wanted}.")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.header.metadata.get(key, default)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def integer(self, key: str, default: int | None = None) -> int | None:
        value = self.header.metadata.get(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._wrong(key, "a whole number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.header.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        value = self.header.metadata.get(key, [])
        if not isinstance(value, list) or (value and not isinstance(value[0], kind)):
            raise self._wrong(key, f"a list of {kind.__name__}")
        return value

    def arch_integer(self, key: str, default: int | None = None) -> int:
        full = f"{self.architecture}.{key}"
        if isinstance(self.header.metadata.get(full), list):
            raise ModelUnsupported(f"{self.file}: {full!r} differs from layer to layer, which is not served here.")
        value = self.integer(full, default)
        if value is None:
            raise self._missing(full)
        if not 0 < value < 1 << 31:
            raise self._wrong(full, "a sensible positive number")
        return value

    def arch_number(self, key: str, default: float | None = None) -> float:
        full = f"{self.architecture}.{key}"
        value = self.header.metadata.get(full, default)
        if value is None:
            raise self._missing(full)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._wrong(full, "a positive number")
        return float(value)

    def arch_has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.header.metadata
