"""AdapterRegistry: which adapters an engine has, under which names, and when their memory is given back. Without mlx.

A name stands for content. A request takes the content that its name stands for when the engine queues it, and keeps it
until it ends. So a name can be unloaded, or loaded with other content, while its requests run: new requests see it at
once, and the old content leaves memory with its last request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from cortexmlx.errors import AdapterRefused, MemoryRefused, UnknownAdapter
from cortexmlx.execution.boundary import AdapterTables, Refused
from cortexmlx.kv.prefix import AdapterSalt, Salt
from cortexmlx.models.adapters.low_rank import AdapterInfo, LowRank
from cortexmlx.system.machine import obtainable
from cortexmlx.types.request import AdapterKey, QueuedRequest


class _Job(Protocol):
    """A job, as far as adapters concern it."""

    adapter: int


@dataclass(frozen=True)
class AdapterLimits:
    """What the adapters of an engine may take: how many contents there are, each one's rank, and bytes of all."""

    adapters: int
    rank: int
    bytes: int


class AdapterRegistry:
    """The adapters of one engine. `tables()` returns those of its model, or raises AdapterRefused. Only the engine's
    thread may call its methods, with the `jobs` that have not ended; any thread may read `infos`.
    """

    def __init__(self, limits: AdapterLimits, tables: Callable[[], AdapterTables]) -> None:
        self.limits = limits
        self.infos: Mapping[str, AdapterInfo] = MappingProxyType({})
        """The adapters that can be asked for, by name. It is replaced as a whole."""
        self._make_tables = tables
        self._tables: AdapterTables | None = None
        self._numbers = 0
        self._keys: dict[str, AdapterKey] = {}
        self._contents: dict[bytes, AdapterKey] = {}
        """What requests have or can have, by digest, also what has no name any more and waits for its requests."""
        self._going: list[int] = []
        """The numbers of content whose memory could not be given back yet. A part of it may be gone, so it is not used
        again.
        """

    @property
    def nbytes(self) -> int:
        """Bytes that all adapters take."""
        return 0 if self._tables is None else self._tables.nbytes

    @property
    def count(self) -> int:
        """How many contents are in memory."""
        return len(self._contents) + len(self._going)

    @property
    def leaving(self) -> int:
        """How many contents have no name any more, and wait for their requests."""
        return len(self._unnamed)

    def load(self, name: str, adapter: LowRank, jobs: Iterable[_Job]) -> AdapterInfo:
        """Let requests name an adapter. A name that stood for other content stands for this from now on.

        Content that leaves memory with that, since it has neither another name nor requests, does not count among
        `limits.adapters`: for a moment there is one content more, so that the name stands for one of them at any time.
        It counts among `limits.bytes`, since for that moment both are in memory.

        Raises AdapterRefused with the numbers if the model cannot serve it, or if it exceeds the limits, and
        MemoryRefused. Then nothing has changed.
        """
        self.sweep(jobs)
        tables = self._tables = self._tables or self._make_tables()
        tables.check(name, adapter)
        key = self._contents.get(adapter.digest)
        if key is None:
            self._check_room(name, adapter, tables, jobs)
            self._numbers += 1  # first: no number is given twice, wherever an exception lands
            key = AdapterKey(self._numbers, adapter.digest)
            if isinstance(refused := tables.add(key.number, adapter), Refused):
                raise MemoryRefused(f"the system gives no memory for the adapter {name!r}: {refused.why}")
            self._contents[adapter.digest] = key
        info = AdapterInfo(
            name=name,
            rank=adapter.rank,
            targets=adapter.targets,
            bytes=tables.bytes_of(adapter),
            digest=adapter.digest.hex(),
            path=str(adapter.path),
            base=adapter.base,
        )
        self._name({**self._keys, name: key}, {**self.infos, name: info}, jobs)
        return info

    def unload(self, name: str, jobs: Iterable[_Job]) -> None:
        """Let no further request name an adapter. Requests that have it keep it, and its memory, until they end. Raises
        UnknownAdapter.
        """
        if name not in self._keys:
            raise unknown(name, self.infos)
        without = {other: key for other, key in self._keys.items() if other != name}
        self._name(without, {other: info for other, info in self.infos.items() if other != name}, jobs)

    def resolved(self, request: QueuedRequest) -> QueuedRequest:
        """Return a request with the adapter that its name stands for now. Raises UnknownAdapter."""
        if request.adapter is None:
            return request
        key = self._keys.get(request.adapter)
        if key is None:
            raise unknown(request.adapter, self.infos)
        return replace(request, adapter_key=key)

    def salt(self, name: str | None, client: str | None) -> Salt:
        """Return under which salt the texts of a client are cached with an adapter. Raises UnknownAdapter."""
        if name is None:
            return client
        if name not in self._keys:
            raise unknown(name, self.infos)
        return AdapterSalt(self._keys[name].digest, client)

    def sweep(self, jobs: Iterable[_Job]) -> None:
        """Give back the memory of content that has neither a name nor requests."""
        unnamed = self._unnamed
        if not (unnamed or self._going) or self._tables is None:
            return
        used = {job.adapter for job in jobs} if unnamed else set()
        for key in unnamed:
            if key.number not in used:
                self._going.append(self._contents.pop(key.digest).number)
        for number in list(self._going):
            if not isinstance(self._tables.remove(number), Refused):
                self._going.remove(number)

    def _name(self, keys: dict[str, AdapterKey], infos: dict[str, AdapterInfo], jobs: Iterable[_Job]) -> None:
        self._keys, self.infos = keys, MappingProxyType(infos)
        self.sweep(jobs)

    @property
    def _unnamed(self) -> list[AdapterKey]:
        named = set(self._keys.values())
        return [key for key in self._contents.values() if key not in named]

    def _has_only(self, name: str) -> bool:
        """Return whether a name stands for content that has no other name."""
        key = self._keys.get(name)
        return key is not None and list(self._keys.values()).count(key) == 1

    def _leaves_with(self, name: str, jobs: Iterable[_Job]) -> bool:
        """Return whether content leaves memory as soon as a name stands for other content."""
        return self._has_only(name) and self._keys[name].number not in {job.adapter for job in jobs}

    def _check_room(self, name: str, adapter: LowRank, tables: AdapterTables, jobs: Iterable[_Job]) -> None:
        limits = self.limits
        if adapter.rank > limits.rank:
            raise AdapterRefused(
                f"the adapter {name!r} ({adapter.path}) has rank {adapter.rank}, and the engine takes {limits.rank} at "
                "most: raise max_adapter_rank."
            )
        busy = f", {self.leaving} of them until their requests end" if self.leaving else ""
        replaced = self._leaves_with(name, jobs)
        if self.count - replaced >= limits.adapters:
            later = f", load {name!r} when its requests have ended" if self._has_only(name) else ""
            raise AdapterRefused(
                f"the engine has {self.count} adapters{busy}, and room for {limits.adapters}: unload one{later}, or "
                "raise max_adapters."
            )
        needed = tables.bytes_with(adapter)
        if needed > limits.bytes:
            both = f"{busy}, also by what {name!r} stands for until this is there: unload {name!r}"
            advice = both if replaced else f"{busy}: unload one"
            raise AdapterRefused(
                f"the adapter {name!r} ({adapter.path}) takes {needed - tables.nbytes} bytes, and {tables.nbytes} of "
                f"{limits.bytes} are taken{advice}, or raise adapter_memory."
            )
        if not obtainable(2 * (needed - tables.nbytes)):  # a layer's table is copied when it grows
            raise MemoryRefused(
                f"the system gives no {needed - tables.nbytes} bytes for the adapter {name!r}: free memory, or unload "
                "an adapter."
            )


def unknown(name: str, known: Iterable[str]) -> UnknownAdapter:
    """Return the error for a name that no adapter has."""
    names = ", ".join(repr(each) for each in known)
    return UnknownAdapter(
        f"no adapter {name!r} is loaded; "
        + (f"there are {names}" if names else "there is none: load_adapter loads one")
    )
