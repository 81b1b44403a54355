"""Which kernel, or which plain way instead of it, serves a layer's single tokens on the Metal backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from cortexmlx.attention import reference
from cortexmlx.attention.choices.decode import DecodeChoices, reproducible_way
from cortexmlx.attention.choices.layer import LayerAttention
from cortexmlx.attention.choices.ways import KERNELS, PLAIN, AttendRows, Way
from cortexmlx.attention.paged import Attend, AttentionCall
from cortexmlx.attention.selfcheck.check import Approval, VariantCheck, check_variant
from cortexmlx.kv.spec import KVSpec
from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.prefill import PrefillVariant
from cortexmlx.metal.rules import Variant, refusal
from cortexmlx.timed_choice.job import CannotServe

_log = logging.getLogger(__name__)

OfLayer = TypeVar("OfLayer", Variant, PrefillVariant)


class KernelWays:
    """The kernels that may serve, by their rules and by the check of each variant, and the choices among them."""

    def __init__(self, kernels: DecodeKernels, approval: Approval) -> None:
        self.choices = DecodeChoices()
        self._kernels = kernels
        self._approval = approval
        self._checks: dict[Variant, VariantCheck] = {}

    def forget_checks(self) -> None:
        """Check every kernel again at its next use."""
        self._checks.clear()

    def serving(self, variant: Variant, way: Way | None) -> Variant | AttendRows:
        """Return what serves a shape by a way: a variant of the kernels, or a plain way. For None, or if the way's
        kernel is disabled, the rules choose: `variant`, or the reference path if that may not serve.
        """
        if way in PLAIN:
            return PLAIN[way]
        if way is not None:
            forced = _forced(variant, way)
            if self.refusal(forced) is None:
                return forced
        if self.approve(variant):
            return variant
        if not self.choices.reproducible:
            return reference.attend_rows
        return PLAIN[reproducible_way(False, variant.softcap, variant.sinks, variant.alibi)]

    def approve(self, variant: Variant) -> bool:
        """Return whether a variant may serve, by the rules and its check. Several threads may ask for different
        variants.
        """
        return self._approval.of(variant, refusal(variant), lambda: self._check(variant))

    def refusal(self, variant: Variant) -> str | None:
        """Return why a kernel may not serve; None if it may. A check that fails is logged once."""
        reason = refusal(variant)
        if reason is not None or not self._approval.check:
            return reason
        new, check = variant not in self._checks, self._check(variant)
        if check.agrees:
            return None
        if new:
            _log.warning(
                "attention (%s) is not computed by this kernel: %s", variant.label, check.message or check.outcome
            )
        return check.outcome

    def _check(self, variant: Variant) -> VariantCheck:
        if variant not in self._checks:
            self._checks[variant] = check_variant(self._kernels, variant)
        return self._checks[variant]


class KernelChoosing:
    """The `ChoosingBackend` of the kernels. `decode(variant, ...)` computes attention by a kernel, with the further
    arguments of `AttendRows`.
    """

    def __init__(self, ways: KernelWays, attend: Attend, decode: Callable[..., Any]) -> None:
        self.choices = ways.choices
        self.attend = attend
        self._ways = ways
        self._decode = decode

    def own_ways(self, layer: LayerAttention) -> tuple[Way, ...]:
        """See `ChoosingBackend`."""
        variant = _variant_of(layer)
        usual = Way(f"{variant.kernel.value} kernel")
        ways = (usual, *(way for way in KERNELS if way is not usual))
        return tuple(way for way in ways if refusal(_forced(variant, way)) is None)

    def fixed_way(self, layer: LayerAttention) -> Way:
        """See `ChoosingBackend`."""
        return next(iter(self.own_ways(layer)), Way.ROWS)

    def attend_by(self, way: Way, layer: LayerAttention) -> AttendRows:
        """See `ChoosingBackend`."""
        if way in PLAIN:
            return PLAIN[way]
        variant = _forced(_variant_of(layer), way)
        reason = self._ways.refusal(variant)
        if reason is not None:
            raise CannotServe(reason)
        return partial(self._decode, variant)


def _forced(variant: Variant, way: Way) -> Variant:
    """Return the variant on the kernel of a way."""
    kernel = KERNELS[way]
    return variant if variant.kernel is kernel else replace(variant, forced=kernel)


def _variant_of(layer: LayerAttention) -> Variant:
    """Return the variant of a layer, on the kernel that the rules choose."""
    return shape_of(Variant, layer.call, layer.spec, layer.block_size)


def shape_of(kind: type[OfLayer], call: AttentionCall, spec: KVSpec, block_size: int) -> OfLayer:
    """Return the variant of a kernel for a layer's call."""
    return kind(
        dtype=call.dtype,
        kv_dtype=spec.dtype,
        key_dim=call.query_dim,
        value_dim=spec.value_dim,
        block_size=block_size,
        group=call.query_heads // spec.kv_heads,
        softcap=call.softcap,
        sinks=call.sinks,
        alibi=call.slopes,
        latent=spec.value_in_key,
        kv_bits=spec.kv_bits,
        quant_group=spec.kv_group_size,
    )
