"""The options of an engine, each written once: its type, default, meaning and limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from numbers import Integral, Real
from pathlib import Path

from cortexmlx.core.adapter_registry import AdapterLimits
from cortexmlx.core.arguments import checked_function, is_adapter_name
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import parse_size
from cortexmlx.kv.spec import BLOCK_SIZES, DEFAULT_BLOCK_SIZE, GROUP_SIZES, KV_BITS
from cortexmlx.scheduling.keep_policy import DEFAULT_KEEP_FIRST, KeepPolicy
from cortexmlx.types.progress import OnProgress
from cortexmlx.types.sampling_params import python_number


@dataclass(frozen=True)
class EngineConfig:
    """The options of an engine. `Engine(...)` takes the same ones. Raises InvalidRequest if one is out of its range."""

    model: str | Path
    """A folder, a hub id, a `.gguf` file or "smollm2"."""

    _: KW_ONLY

    hosts: int | str | Path | None = None
    """Spread the model over so many processes here, or over the machines of an MLX host file. The library then starts
    processes. None: all in this process.
    """

    resume_lost: bool = False
    """With `hosts`: requests that run while a worker is lost begin again with their tokens, once the workers are back.
    False: they fail with HostLost.
    """

    adapter: str | Path | None = None
    """The folder of a LoRA or DoRA adapter for the model, or of fine-tuned layers."""

    adapters: Mapping[str, str | Path] | None = None
    """LoRA adapters that requests can name: a folder for each name. More can be loaded while the engine runs. None:
    none at first, and no memory is set aside for any.
    """

    max_adapters: int = 16
    """How many adapters there may be at once. There is one more for a moment while a name is loaded anew."""

    max_adapter_rank: int = 128
    """Bound of an adapter's rank."""

    adapter_memory: int | str = "1GB"
    """Bound of the memory of all adapters: bytes, or a text like "500MB"."""

    kv_memory: int | str | None = None
    """Bound of the KV cache: bytes, or a text like "4GB". None: a modest share of the machine."""

    kv_bits: int | None = None
    """8 or 4 quantizes keys and values, so that about twice as much or more fits. None: they keep their type."""

    kv_group_size: int | None = None
    """Numbers that share a scale and a bias with `kv_bits`: 64 or 32. None: 64 where that divides every head."""

    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens of a KV block: 8, 16, 32, 64 or 128."""

    max_rows: int = 16
    """Requests that run at once."""

    attention: str = "auto"
    """Where attention runs: "auto", "metal", "reference" or "sim"."""

    reproducible: bool = False
    """Compute attention in one way whatever is in a step, so that a row's attention has the same bits alone and in any
    batch. No tokens are drafted then, `forced_tokens` and `speculate` notwithstanding, since drafted tokens are
    computed in another way. False: the fastest way serves each kind of step, which may round differently.
    """

    prefill_budget: int | None = None
    """Prompt tokens that a step computes at most. None: 512; on an Apple GPU up to 2,048 while no answer goes on."""

    max_request_tokens: int | None = None
    """Bound of the prompt and answer of one request, in tokens."""

    client_tokens: int | None = None
    """Bound of all running requests of one named client, in tokens."""

    token_target: float | None = 0.25
    """Seconds that a step should take at most while others decode: long prompts get smaller pieces. None: no target."""

    keep_first: int | None = None
    """With `keep_last`: tokens at the beginning of a text that are never dropped. None: 4."""

    keep_last: int | None = None
    """Allow texts longer than context and KV cache: at `keep_first` + 2 x `keep_last` tokens, the first `keep_first`
    and the newest `keep_last` stay. None: no token is dropped.
    """

    prefix_cache: bool = True
    """Reuse the keys and values of a prompt's beginning. False computes every prompt anew."""

    share_prefixes_between_clients: bool = False
    """True lets all clients share cached beginnings, for clients that trust each other: `cached_tokens` and the time
    to the first token tell one client what another asked. False: named clients share only with themselves.
    """

    pipeline: bool = True
    """Build a decode step before the last one is read."""

    forced_tokens: bool = True
    """Compute several tokens of a structured answer in one step, where its form leaves no choice."""

    speculate: bool = True
    """Draft the next tokens of answers from what they and their prompts repeat, and verify several in one step, while
    that is faster. The tokens stay the same.
    """

    draft: str | Path | None = None
    """What guesses the next tokens: a smaller model with the same tokens, which shares the KV memory; an assistant of
    Gemma 4; or another checkpoint of the model, which has kept its draft head. None: nothing besides.
    """

    dequantize: bool | None = None
    """Turn quantized weights into plain ones: see `load_model`."""

    kv_store: str | Path | None = None
    """A folder that keeps KV blocks when they leave memory, also for the next engine. Several engines may share it.
    With `hosts`, nothing is kept.
    """

    kv_store_bytes: int | str = "4GB"
    """Bound of that folder."""

    on_progress: OnProgress | None = None
    """Called with the progress of downloading and loading."""

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, python_number(getattr(self, each.name)))
        self._require("block_size", _is_one_of(self.block_size, BLOCK_SIZES), f"one of {BLOCK_SIZES}")
        self._require("max_rows", is_count(self.max_rows, 1), "at least 1")
        budget = self.prefill_budget
        self._require("prefill_budget", budget is None or is_count(budget, 1), "at least 1 token, or None")
        for name in ("max_request_tokens", "client_tokens"):
            tokens = getattr(self, name)
            self._require(name, tokens is None or is_count(tokens, 2), "at least 2 tokens or None")
        target = self.token_target
        target_ok = isinstance(target, Real) and not isinstance(target, bool) and target > 0
        self._require("token_target", target is None or target_ok, "more than 0 seconds or None")
        bits_ok = self.kv_bits is None or _is_one_of(self.kv_bits, KV_BITS)
        self._require("kv_bits", bits_ok, f"one of {KV_BITS} or None")
        group_size_ok = self.kv_group_size is None or (
            self.kv_bits is not None and _is_one_of(self.kv_group_size, GROUP_SIZES)
        )
        self._require("kv_group_size", group_size_ok, f"one of {GROUP_SIZES}, with kv_bits, or None")
        first, last = self.keep_first, self.keep_last
        self._require("keep_first", first is None or is_count(first, 0), "at least 0 tokens or None")
        self._require("keep_last", last is None or is_count(last, 1), "at least 1 token or None")
        self._require("reproducible", isinstance(self.reproducible, bool), "True or False")
        self._require("speculate", isinstance(self.speculate, bool), "True or False")
        self._require("attention", isinstance(self.attention, str), 'a text, such as "auto"')
        draft_ok = self.draft is None or isinstance(self.draft, (str, Path))
        self._require("draft", draft_ok, "a model's name or path, or None")
        self._check_hosts()
        for name in ("adapter", "kv_store"):
            path = getattr(self, name)
            self._require(name, path is None or isinstance(path, (str, Path)), "the path of a folder or None")
        self._check_adapters()
        checked_function("on_progress", self.on_progress)
        if self.keep_last is None:
            self._require("keep_first", self.keep_first is None, "None without keep_last (--keep-last)")
        if self.kv_memory is not None:
            parse_size(self.kv_memory)
        parse_size(self.kv_store_bytes)

    def _check_adapters(self) -> None:
        """Raise InvalidRequest if `adapters` or a limit on them is wrong. Folders are read when the engine opens."""
        is_mapping = self.adapters is None or isinstance(self.adapters, Mapping)
        self._require("adapters", is_mapping, "a mapping of names to folders, or None")
        for name, path in (self.adapters or {}).items():
            ok = is_adapter_name(name) and isinstance(path, (str, Path))
            self._require("adapters", ok, "a mapping of names, of 1 to 1,024 characters, to folders")
        self._require("max_adapters", is_count(self.max_adapters, 1), "at least 1")
        self._require("max_adapter_rank", is_count(self.max_adapter_rank, 1), "at least 1")
        parse_size(self.adapter_memory)

    def _check_hosts(self) -> None:
        """Raise InvalidRequest if `hosts` is malformed, or combined with options that a model on hosts cannot have."""
        hosts = self.hosts
        is_host_file = isinstance(hosts, (str, Path)) and str(hosts).strip() != ""
        self._require(
            "hosts", hosts is None or is_host_file or is_count(hosts, 1), "a number, a host file's path or None"
        )
        self._require("resume_lost", isinstance(self.resume_lost, bool), "True or False")
        if hosts is None:
            return
        self._require("draft", self.draft is None, "None with hosts: a draft model runs in this process alone")
        self._require("adapters", self.adapters is None, "None with hosts, which serve no adapters per request")

    @property
    def kv_bytes(self) -> int | None:
        """`kv_memory` in bytes; None if it is not set."""
        return None if self.kv_memory is None else parse_size(self.kv_memory)

    @property
    def adapter_limits(self) -> AdapterLimits:
        """How many adapters the engine may hold, of which rank, and in how many bytes."""
        return AdapterLimits(self.max_adapters, self.max_adapter_rank, parse_size(self.adapter_memory))

    @property
    def active_draft(self) -> str | Path | None:
        """The draft model to load; None if there is none, or if nothing is drafted (`speculate`, `reproducible`)."""
        return self.draft if self.speculate and not self.reproducible else None

    @property
    def store_bytes(self) -> int:
        """`kv_store_bytes` in bytes."""
        return parse_size(self.kv_store_bytes)

    @property
    def keep(self) -> KeepPolicy | None:
        """Which tokens a row keeps in the KV cache when it grows long; None: all."""
        if self.keep_last is None:
            return None
        return KeepPolicy(DEFAULT_KEEP_FIRST if self.keep_first is None else self.keep_first, self.keep_last)

    def _require(self, name: str, ok: bool, requirement: str) -> None:
        """Raise InvalidRequest, with the option's name and value, unless `ok`. `requirement` says what it must be."""
        if not ok:
            raise InvalidRequest(f"{name} is {getattr(self, name)!r:.80}, but must be {requirement}")


def is_count(value: object, minimum: int) -> bool:
    """Return whether a value is an integer of at least `minimum`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= minimum


def _is_one_of(value: object, numbers: Collection[int]) -> bool:
    """Return whether a value is an integer among `numbers`. Arrays cannot be compared with `in`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and value in numbers
