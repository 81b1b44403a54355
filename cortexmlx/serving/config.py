"""How to open an engine: every option with its default and its limits, once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.quantized import GROUP_SIZES, KV_BITS
from cortexmlx.kv.sizing import parse_size
from cortexmlx.kv.spec import BLOCK_SIZES, DEFAULT_BLOCK_SIZE
from cortexmlx.progress import OnProgress
from cortexmlx.scheduling.keep import DEFAULT_FIRST, KeepPolicy


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
        self._require("block_size", self.block_size in BLOCK_SIZES, f"one of {BLOCK_SIZES}")
        self._require("max_rows", isinstance(self.max_rows, int) and self.max_rows >= 1, "at least 1")
        budget = isinstance(self.prefill_budget, int) and self.prefill_budget >= 1
        self._require("prefill_budget", budget, "at least 1 token")
        for name in ("max_request_tokens", "client_tokens"):
            tokens = getattr(self, name)
            self._require(name, tokens is None or tokens >= 2, "at least 2 tokens or None")
        self._require("token_target", self.token_target is None or self.token_target > 0, "more than 0 seconds or None")
        self._require("kv_bits", self.kv_bits in (None, *KV_BITS), f"one of {KV_BITS} or None")
        group = f"one of {GROUP_SIZES}, with kv_bits, or None"
        self._require("kv_group_size", self.kv_group_size in ((None, *GROUP_SIZES) if self.kv_bits else (None,)), group)
        self._require("keep_first", self.keep_first is None or self.keep_first >= 0, "at least 0 tokens or None")
        self._require("keep_last", self.keep_last is None or self.keep_last >= 1, "at least 1 token or None")
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
            raise InvalidRequest(f"{name} is {getattr(self, name)!r}, but must be {wanted}")
