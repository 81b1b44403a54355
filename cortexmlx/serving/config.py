"""How to open an engine: every option with its default and its limits, once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.quantized import GROUP_SIZES, KV_BITS
from cortexmlx.kv.sizing import parse_size
from cortexmlx.kv.spec import BLOCK_SIZES, DEFAULT_BLOCK_SIZE
from cortexmlx.progress import OnProgress
from cortexmlx.scheduling.keep import DEFAULT_FIRST, KeepPolicy
from cortexmlx.serving.app.arguments import checked_function


@dataclass(frozen=True)
class EngineConfig:
    """The options of an engine; `Engine` says what they mean. Raises InvalidRequest if one is out of its range."""

    model: str | Path
    adapter: str | Path | None = None
    kv_memory: int | str | None = None
    kv_bits: int | None = None
    kv_group_size: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    max_rows: int = 16
    attention: str = "auto"
    prefill_budget: int = 512
    max_request_tokens: int | None = None
    client_tokens: int | None = None
    token_target: float | None = 0.25
    keep_first: int | None = None
    keep_last: int | None = None
    prefix_cache: bool = True
    share_prefixes_between_clients: bool = False
    pipeline: bool = True
    dequantize: bool | None = None
    kv_store: str | Path | None = None
    kv_store_bytes: int | str = "4GB"
    on_progress: OnProgress | None = None

    def __post_init__(self) -> None:
        self._require("block_size", _is_one_of(self.block_size, BLOCK_SIZES), f"one of {BLOCK_SIZES}")
        self._require("max_rows", _is_count(self.max_rows, 1), "at least 1")
        self._require("prefill_budget", _is_count(self.prefill_budget, 1), "at least 1 token")
        for name in ("max_request_tokens", "client_tokens"):
            tokens = getattr(self, name)
            self._require(name, tokens is None or _is_count(tokens, 2), "at least 2 tokens or None")
        target = self.token_target
        seconds = isinstance(target, Real) and not isinstance(target, bool) and target > 0
        self._require("token_target", target is None or seconds, "more than 0 seconds or None")
        bits = self.kv_bits is None or _is_one_of(self.kv_bits, KV_BITS)
        self._require("kv_bits", bits, f"one of {KV_BITS} or None")
        sized = self.kv_group_size is None or (self.kv_bits is not None and _is_one_of(self.kv_group_size, GROUP_SIZES))
        self._require("kv_group_size", sized, f"one of {GROUP_SIZES}, with kv_bits, or None")
        first, last = self.keep_first, self.keep_last
        self._require("keep_first", first is None or _is_count(first, 0), "at least 0 tokens or None")
        self._require("keep_last", last is None or _is_count(last, 1), "at least 1 token or None")
        self._require("attention", isinstance(self.attention, str), 'a text, such as "auto"')
        for name in ("adapter", "kv_store"):
            path = getattr(self, name)
            self._require(name, path is None or isinstance(path, (str, Path)), "the path of a folder or None")
        checked_function("on_progress", self.on_progress)
        if self.keep_last is None:
            self._require("keep_first", self.keep_first is None, "None without keep_last (--keep-last)")
        if self.kv_memory is not None:
            parse_size(self.kv_memory)
        parse_size(self.kv_store_bytes)

    @property
    def kv_bytes(self) -> int | None:
        """`kv_memory` in bytes."""
        return None if self.kv_memory is None else parse_size(self.kv_memory)

    @property
    def store_bytes(self) -> int:
        """`kv_store_bytes` in bytes."""
        return parse_size(self.kv_store_bytes)

    @property
    def keep(self) -> KeepPolicy | None:
        """Which tokens a row keeps; None: all."""
        if self.keep_last is None:
            return None
        return KeepPolicy(DEFAULT_FIRST if self.keep_first is None else self.keep_first, self.keep_last)

    def _require(self, name: str, ok: bool, wanted: str) -> None:
        if not ok:
            raise InvalidRequest(f"{name} is {getattr(self, name)!r:.80}, but must be {wanted}")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _is_one_of(value: object, numbers: Collection[int]) -> bool:
    """Arrays have no answer to whether they are in a list."""
    return isinstance(value, Integral) and not isinstance(value, bool) and value in numbers
