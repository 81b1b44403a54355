"""AdapterRegistry: which adapters an engine has, under which names, and when their memory is given back. Without mlx.

A name stands for content. A request takes the content that its name stands for when the engine queues it, and keeps it
until it ends. So a name can be unloaded, or loaded with other content, while its requests run: new requests see it at
once, and the old content leaves memory with its last request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from cortexmlx.errors import AdapterRefused, MemoryRefused, UnknownAdapter
from cortexmlx.execution.boundary import AdapterSet, Refusal
from cortexmlx.kv.prefix import AdapterSalt, Salt
from cortexmlx.models.adapters.low_rank import AdapterInfo, LowRankAdapter
from cortexmlx.scheduling.job import Job
from cortexmlx.system.machine import can_allocate
from cortexmlx.types.request import AdapterKey, QueuedRequest


@dataclass(frozen=True)
class AdapterLimits:
    """Limits on an engine's adapters: how many, the largest rank of one, and the bytes of all together."""

    adapters: int
    rank: int
    bytes: int


class AdapterRegistry:
    """The LoRA adapters that an engine has loaded, by name. `make_adapter_set()` returns the model's AdapterSet or
    raises AdapterRefused. Only the engine's thread may call its methods. They take as `jobs` all jobs that
    have not ended. Any thread may read `infos`.
    """

    def __init__(self, limits: AdapterLimits, make_adapter_set: Callable[[], AdapterSet]) -> None:
        self.limits = limits
        self.infos: Mapping[str, AdapterInfo] = MappingProxyType({})
        """The adapters that can be asked for, by name. It is replaced as a whole."""
        self._make_adapter_set = make_adapter_set
        self._adapter_set: AdapterSet | None = None
        self._last_number = 0
        self._keys: dict[str, AdapterKey] = {}
        self._contents: dict[bytes, AdapterKey] = {}
        """What requests have or can have, by digest, also what has no name any more and waits for its requests."""
        self._pending_removals: list[int] = []
        """The numbers of content whose memory could not be given back yet. A part of it may be gone, so it is not used
        again.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of memory that all adapters take."""
        return 0 if self._adapter_set is None else self._adapter_set.nbytes

    @property
    def loaded_count(self) -> int:
        """How many adapters are in memory. The same adapter under two names counts once."""
        return len(self._contents) + len(self._pending_removals)

    @property
    def unloading_count(self) -> int:
        """How many adapters have no name any more, and stay in memory until the requests that use them end."""
        return len(self._unnamed_keys)

    def load(self, name: str, adapter: LowRankAdapter, jobs: Iterable[Job]) -> AdapterInfo:
        """Load an adapter under a name. If the name has another adapter, replace it.

        Content that leaves memory with that, since it has neither another name nor requests, does not count among
        `limits.adapters`: for a moment there is one content more, so that the name stands for one of them at any time.
        It counts among `limits.bytes`, since for that moment both are in memory.

        Raises AdapterRefused with the numbers if the model cannot serve it, or if it exceeds the limits, and
        MemoryRefused. Then nothing has changed.
        """
        self.free_unused(jobs)
        adapters = self._adapter_set = self._adapter_set or self._make_adapter_set()
        adapters.check(name, adapter)
        key = self._contents.get(adapter.digest)
        if key is None:
            self._check_room(name, adapter, adapters, jobs)
            self._last_number += 1  # first: no number is given twice, wherever an exception lands
            key = AdapterKey(self._last_number, adapter.digest)
            if isinstance(refusal := adapters.add(key.number, adapter), Refusal):
                raise MemoryRefused(f"the system gives no memory for the adapter {name!r}: {refusal.why}")
            self._contents[adapter.digest] = key
        info = AdapterInfo(
            name=name,
            rank=adapter.rank,
            targets=adapter.targets,
            bytes=adapters.bytes_of(adapter),
            digest=adapter.digest.hex(),
            path=str(adapter.path),
            base=adapter.base,
        )
        self._set_names({**self._keys, name: key}, {**self.infos, name: info}, jobs)
        return info

    def unload(self, name: str, jobs: Iterable[Job]) -> None:
        """Unload an adapter. Requests that use it keep it, and its memory, until they end. Raises UnknownAdapter."""
        if name not in self._keys:
            raise unknown_adapter_error(name, self.infos)
        remaining_keys = {other: key for other, key in self._keys.items() if other != name}
        self._set_names(remaining_keys, {other: info for other, info in self.infos.items() if other != name}, jobs)

    def resolve(self, request: QueuedRequest) -> QueuedRequest:
        """Return the request with the key that its adapter name stands for now. Raises UnknownAdapter."""
        if request.adapter is None:
            return request
        key = self._keys.get(request.adapter)
        if key is None:
            raise unknown_adapter_error(request.adapter, self.infos)
        return replace(request, adapter_key=key)

    def cache_salt(self, name: str | None, client: str | None) -> Salt:
        """Return the salt of a pinned prefix's cached blocks, as `Job.block_salt` is a job's. Raises UnknownAdapter."""
        if name is None:
            return client
        if name not in self._keys:
            raise unknown_adapter_error(name, self.infos)
        return AdapterSalt(self._keys[name].digest, client)

    def free_unused(self, jobs: Iterable[Job]) -> None:
        """Free the memory of adapters that have neither a name nor requests."""
        unnamed_keys = self._unnamed_keys
        if not (unnamed_keys or self._pending_removals) or self._adapter_set is None:
            return
        used_numbers = {job.adapter for job in jobs} if unnamed_keys else set()
        for key in unnamed_keys:
            if key.number not in used_numbers:
                self._pending_removals.append(self._contents.pop(key.digest).number)
        for number in list(self._pending_removals):
            if not isinstance(self._adapter_set.remove(number), Refusal):
                self._pending_removals.remove(number)

    def _set_names(self, keys: dict[str, AdapterKey], infos: dict[str, AdapterInfo], jobs: Iterable[Job]) -> None:
        """Replace the names of all adapters, and free the adapters that are unused now."""
        self._keys, self.infos = keys, MappingProxyType(infos)
        self.free_unused(jobs)

    @property
    def _unnamed_keys(self) -> list[AdapterKey]:
        """The keys of the adapters in memory that have no name."""
        named_keys = set(self._keys.values())
        return [key for key in self._contents.values() if key not in named_keys]

    def _is_only_name(self, name: str) -> bool:
        """Return whether a name stands for an adapter that has no other name."""
        key = self._keys.get(name)
        return key is not None and list(self._keys.values()).count(key) == 1

    def _check_room(self, name: str, adapter: LowRankAdapter, adapters: AdapterSet, jobs: Iterable[Job]) -> None:
        """Raise AdapterRefused if an adapter exceeds a limit, and MemoryRefused if the system has no memory for it."""
        limits = self.limits
        if adapter.rank > limits.rank:
            raise AdapterRefused(
                f"the adapter {name!r} ({adapter.path}) has rank {adapter.rank}, and the engine takes {limits.rank} at "
                "most: raise max_adapter_rank."
            )
        busy = f", {self.unloading_count} of them until their requests end" if self.unloading_count else ""
        # Replacing the adapter of a name frees the old one at once if no other name or job uses it.
        frees_old = self._is_only_name(name) and self._keys[name].number not in {job.adapter for job in jobs}
        if self.loaded_count - frees_old >= limits.adapters:
            later_advice = f", load {name!r} when its requests have ended" if self._is_only_name(name) else ""
            raise AdapterRefused(
                f"the engine has {self.loaded_count} adapters{busy}, and room for {limits.adapters}: unload "
                f"one{later_advice}, or "
                "raise max_adapters."
            )
        needed_bytes = adapters.bytes_with(adapter)
        if needed_bytes > limits.bytes:
            replace_advice = f"{busy}, also by what {name!r} stands for until this is there: unload {name!r}"
            advice = replace_advice if frees_old else f"{busy}: unload one"
            raise AdapterRefused(
                f"the adapter {name!r} ({adapter.path}) takes {needed_bytes - adapters.nbytes} bytes, and "
                f"{adapters.nbytes} of {limits.bytes} are taken{advice}, or raise adapter_memory."
            )
        if not can_allocate(2 * (needed_bytes - adapters.nbytes)):  # a layer's table is copied when it grows
            raise MemoryRefused(
                f"the system gives no {needed_bytes - adapters.nbytes} bytes for the adapter {name!r}: free memory, or "
                "unload an adapter."
            )


def unknown_adapter_error(name: str, known_names: Iterable[str]) -> UnknownAdapter:
    """Return the error for a name under which no adapter is loaded."""
    names = ", ".join(repr(each) for each in known_names)
    return UnknownAdapter(
        f"no adapter {name!r} is loaded; "
        + (f"there are {names}" if names else "there is none: load_adapter loads one")
    )
