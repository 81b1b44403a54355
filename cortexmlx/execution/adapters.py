"""ServedAdapters: the adapters of a model that runs on paged attention. Only the engine's thread may use it.

A step without adapters runs the model's own modules. For a step with some, the layers that these change become
instances of a class that also adds what the adapters say (`make_adapted_class`), until the step's graph is built.
Weights are never changed, so quantized layers stay quantized, and rows with other adapters or none are in the same
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from cortexmlx.attention.recurrent import SpanStep, TokenSpan
from cortexmlx.errors import AdapterRefused
from cortexmlx.execution.boundary import return_refusals
from cortexmlx.execution.output_projection import own_modules
from cortexmlx.models.adapters.low_rank import AS_MODEL_ADVICE, LowRankAdapter, Matrix
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.types.arrays import IntArray

_MIN_RANK = 8


class AdapterGroup:
    """LoRA adapters with the same target layers and the same table rank (see `_table_rank`).
    They share one table per target, so that a step with several of them takes one product with A and one with B.
    """

    def __init__(self, modules: dict[str, nn.Module], rank: int, dtype: mx.Dtype) -> None:
        self.numbers: list[int] = []
        """The adapters, in the order of their slots, which begin at 1."""
        self.tables: dict[int, SlotTable] = {}
        """The table of each target, by the id of its module."""
        self.route: Route | None = None
        """Of the step whose graph is being built; None: it has none of these adapters."""
        self.slots: IntArray = np.zeros(0, np.int32)
        """`[T]`: the slot of each token of that step."""
        self._modules = modules
        for module in modules.values():
            ins, outs = linear_size(module) or (0, 0)
            self.tables[id(module)] = SlotTable(ins, outs, rank, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(table.nbytes for table in self.tables.values())

    @property
    def modules(self) -> list[nn.Module]:
        """The layers that its adapters change, each once."""
        return list({id(module): module for module in self._modules.values()}.values())

    def append(self, number: int, adapter: LowRankAdapter) -> None:
        """Add an adapter under its `number`. If it fails, some tables have an unused slot until the next change."""
        for name, (a, b) in adapter.pairs.items():
            self.tables[id(self._modules[name])].append(1 + len(self.numbers), a, b)
        self.numbers.append(number)

    def remove(self, number: int) -> None:
        """Remove an adapter that is not the only one, and move the last adapter to its slot. If a table cannot be
        changed, the other adapters serve as before.
        """
        slot, last = 1 + self.numbers.index(number), len(self.numbers)
        if slot < last:
            for table in self.tables.values():
                table.copy_slot(last, slot)
            self.numbers[slot - 1] = self.numbers[-1]
        self.numbers.pop()

    def trim(self) -> None:
        """Drop the unused slots at the end of all tables. If that fails, all adapters still serve."""
        for table in self.tables.values():
            table.keep_first(1 + len(self.numbers))

    def begin_step(self, numbers: IntArray) -> None:
        """Note which adapter each token of the next step uses: `numbers` `[T]`, 0 for none."""
        slots = np.zeros(len(numbers), np.int32)
        for slot, number in enumerate(self.numbers, 1):
            slots[numbers == number] = slot
        self.slots, self.route = slots, make_route(slots)


class ServedAdapters:
    """The loaded LoRA adapters of a paged model, and the layers that apply them per token. `lazy_pass` builds a pass
    that is never evaluated: see `find_unsupported_layers`. Call `find_layers` before adding an adapter.
    """

    def __init__(self, model: nn.Module, lazy_pass: Callable[[mx.array, Any], object]) -> None:
        self._model = model
        self._lazy_pass = lazy_pass
        self._dtype = mx.float32
        self._modules: dict[str, nn.Module] = {}
        self._unsupported_reasons: dict[str, str] = {}
        self._groups: dict[tuple[int, tuple[str, ...]], AdapterGroup] = {}
        self._active: list[AdapterGroup] = []
        self._changed_modules: list[nn.Module] = []
        """The layers that the active groups change, each once."""
        self._route_key: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._step: SpanStep | None = None
        self._parts: dict[tuple[int, int], tuple[TokenSpan, Route | None]] = {}

    # -- loading ------------------------------------------------------------------------------------------------------

    def find_layers(self, dtype: str) -> None:
        """Find the layers that adapters can change. `dtype` is that of the model's activations."""
        if mx.default_device() != mx.cpu:  # MLX's CPU build gathers products of float32 alone
            self._dtype = getattr(mx, dtype)
        self._modules = linear_layers(self._model)
        self._unsupported_reasons = find_unsupported_layers(self._modules, self._lazy_pass)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables of all adapters."""
        return sum(group.nbytes for group in self._groups.values())

    def check(self, name: str, adapter: LowRankAdapter) -> None:
        """Raise AdapterRefused if the adapter does not fit this model, or changes what cannot be changed per request:
        embeddings, experts, the layer that gives the logits. `name` is for the error.
        """
        adapter_text = f"the adapter {name!r} ({adapter.path})"
        target_by_module: dict[int, str] = {}
        for target, (a, b) in adapter.pairs.items():
            module = self._modules.get(target)
            if module is None:
                module_names = {other_name for other_name, _ in own_modules(self._model)}
                kind = "no linear layer" if target in module_names else "no layer"
                made_for = f" It was made for {adapter.base}." if adapter.base and kind == "no layer" else ""
                advice = f": {AS_MODEL_ADVICE}" if kind == "no linear layer" else ""
                raise AdapterRefused(
                    f"{adapter_text} changes {target}, which is {kind} of this model{advice}.{made_for}"
                )
            layer_size = linear_size(module)
            if (a.shape[0], b.shape[1]) != layer_size:
                raise AdapterRefused(
                    f"{adapter_text} was made for another model: {target} has {a.shape[0]} inputs and {b.shape[1]} "
                    f"outputs there, and {layer_size[0] if layer_size else 0} and {layer_size[1] if layer_size else 0} "
                    "here."
                )
            if reason := self._unsupported_reasons.get(target):
                raise AdapterRefused(
                    f"{adapter_text} changes {target}, which cannot be done per request: {reason}. {_ADVICE}"
                )
            if (other := target_by_module.setdefault(id(module), target)) != target:
                raise AdapterRefused(
                    f"{adapter_text} changes {other} and {target}, which are one layer here. {_ADVICE}"
                )

    def bytes_of(self, adapter: LowRankAdapter) -> int:
        """Return the bytes that an adapter adds to tables that exist already."""
        rank = _table_rank(adapter.rank)
        numbers = sum(rank * (a.shape[0] + b.shape[1]) for a, b in adapter.pairs.values())
        return int(numbers * self._dtype.size)

    def bytes_with(self, adapter: LowRankAdapter) -> int:
        """Return the bytes of all tables once this adapter is added."""
        new = self._group_key(adapter) not in self._groups
        return self.nbytes + self.bytes_of(adapter) * (2 if new else 1)

    @return_refusals
    def add(self, number: int, adapter: LowRankAdapter) -> None:
        """Add an adapter that `check` accepts. Steps name it by `number`, above 0. Steps in flight are not affected."""
        key = self._group_key(adapter)
        group = self._groups.get(key) or AdapterGroup(
            {name: self._modules[name] for name in adapter.pairs}, key[0], self._dtype
        )
        group.append(number, adapter)
        for module in group.modules:
            module.adapter_hook = _LayerHook(self, id(module))
        self._groups[key] = group
        self._forget_route()

    @return_refusals
    def remove(self, number: int) -> None:
        """Remove an adapter that no later step names, and drop the unused slots. Unknown numbers are ignored."""
        self._forget_route()
        for key, group in list(self._groups.items()):
            if group.numbers == [number]:
                del self._groups[key]
                continue
            if number in group.numbers:
                group.remove(number)
            group.trim()

    def forget(self) -> None:
        """Drop all state of the last step, which may have failed anywhere, and restore the layers' own classes."""
        self._forget_route()
        self._step = None
        self._parts.clear()
        restore_classes(self._modules.values())

    def close(self) -> None:
        """Free all tables, and leave the model's layers as they were. Safe to call again."""
        self.forget()
        self._groups.clear()
        for module in self._modules.values():
            vars(module).pop("adapter_hook", None)
        self._modules.clear()

    def _forget_route(self) -> None:
        """Make the next step compute its routes again."""
        self._route_key = None
        self._active, self._changed_modules = [], []

    @staticmethod
    def _group_key(adapter: LowRankAdapter) -> tuple[int, tuple[str, ...]]:
        """Return the key of the group that an adapter belongs to: its table rank and its targets."""
        return _table_rank(adapter.rank), adapter.targets

    # -- a step -------------------------------------------------------------------------------------------------------

    @contextmanager
    def apply_to_step(self, plan: StepPlan, states: SpanStep | None) -> Iterator[None]:
        """Make the model's layers apply the adapters of a step in this context. The step must have some. `states` says
        which tokens recurrent layers are called with.
        """
        self._route_step(plan)
        self._step = states
        try:
            with swap_classes(self._changed_modules):
                yield
        finally:
            self._step = None
            self._parts.clear()

    def _route_step(self, plan: StepPlan) -> None:
        """Find the adapter of each token of a step, unless the last step had the same ones."""
        assert plan.adapters is not None
        route_key = plan.adapters, tuple([segment.count for segment in plan.segments])
        if route_key == self._route_key:
            return
        loaded_numbers = {number for group in self._groups.values() for number in group.numbers}
        if unknown_numbers := set(plan.adapters) - loaded_numbers - {0}:
            raise RuntimeError(f"a step names adapters that are not loaded: {sorted(unknown_numbers)}")
        numbers = np.repeat(np.array(plan.adapters, np.int32), route_key[1])
        for group in self._groups.values():
            group.begin_step(numbers)
        self._active = [group for group in self._groups.values() if group.route is not None]
        self._changed_modules = list(
            {id(module): module for group in self._active for module in group.modules}.values()
        )
        self._route_key = route_key

    def add_products(self, module: int, x: mx.array, out: mx.array) -> mx.array:
        """Return a layer's `out` plus what the step's adapters compute from its input `x`. `module`: the layer's id."""
        part = None if self._step is None else self._step.current_span
        for index, group in enumerate(self._active):
            table = group.tables.get(module)
            if table is None:
                continue
            route = group.route if part is None else self._part_route(index, group, part)
            if route is None:
                continue
            # A recurrent layer may look at a piece token by token. All of it is one row's, so any part of it is served.
            if route.tokens * x.shape[-1] != x.size and (part is None or not part.is_piece):
                raise RuntimeError(f"a layer with adapters gets {x.shape} for {route.tokens} tokens")
            out = table.add_products(route, x, out)
        return out

    def _part_route(self, index: int, group: AdapterGroup, part: TokenSpan) -> Route | None:
        """Return the adapter slots of a recurrent layer's tokens as a route, computed once per step and group."""
        cached_part = self._parts.get((index, id(part)))
        if cached_part is None:
            cached_part = self._parts[index, id(part)] = part, make_route(group.slots[part.tokens.ravel()])
        return cached_part[1]


class _LayerHook:
    """Adds the adapters' products to one layer's output. It is no module, so MLX does not look for parameters in it."""

    def __init__(self, adapters: ServedAdapters, module: int) -> None:
        self._adapters = adapters
        self._module = module

    def __call__(self, x: mx.array, out: mx.array) -> mx.array:
        return self._adapters.add_products(self._module, x, out)


_ADVICE = AS_MODEL_ADVICE[0].upper() + AS_MODEL_ADVICE[1:] + "."


def _table_rank(rank: int) -> int:
    """Return the rank of a table for adapters of this `rank`: it is rounded up to a power of two, at least 8."""
    return max(_MIN_RANK, 1 << (rank - 1).bit_length())


# Where an adapter can be added to a model's modules, found by a pass that is never evaluated.


_ALL, _PICKED = 3, (0, 2)
"""Tokens of that pass, and those that get logits."""


@cache
def make_adapted_class(kind: type[Any]) -> type[Any]:
    """Return a subclass of the module class `kind` whose output goes through the module's own `adapter_hook`."""
    original_call = kind.__call__

    def call_with_hook(module: Any, x: mx.array) -> Any:
        return module.adapter_hook(x, original_call(module, x))

    return type(f"Adapted{kind.__name__}", (kind,), {"__call__": call_with_hook, "unadapted": kind})


def restore_classes(modules: Iterable[nn.Module]) -> None:
    """Give the modules their own classes back, after an exception within `swap_classes` left others in place."""
    for module in modules:
        if (kind := getattr(type(module), "unadapted", None)) is not None:
            object.__setattr__(module, "__class__", kind)


@contextmanager
def swap_classes(
    modules: Iterable[nn.Module], make_class: Callable[[Any], type[Any]] = make_adapted_class
) -> Iterator[None]:
    """Make each module an instance of `make_class(its class)` in this context."""
    kinds: list[tuple[nn.Module, Any]] = [(module, type(module)) for module in modules]
    set_attribute = object.__setattr__  # nn.Module's own takes ten times as long, and this happens in each step
    try:
        for module, kind in kinds:
            set_attribute(module, "__class__", make_class(kind))
        yield
    finally:
        for module, kind in kinds:
            set_attribute(module, "__class__", kind)


def linear_size(module: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a linear layer, quantized or not; None for any other module."""
    if isinstance(module, nn.QuantizedLinear):
        outs, packed_width = module.weight.shape
        return packed_width * 32 // module.bits, outs
    if isinstance(module, nn.Linear):
        outs, ins = module.weight.shape
        return ins, outs
    return None


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of a model by name. A layer with two names is under both."""
    return {name: module for name, module in own_modules(model) if linear_size(module) is not None}


def find_unsupported_layers(
    modules: Mapping[str, nn.Module], lazy_pass: Callable[[mx.array, Sequence[int]], object]
) -> dict[str, str]:
    """Return, by name, why an adapter cannot be added to some of the `modules`. `lazy_pass(tokens, rows)` builds a
    pass over flat tokens `[T, 1]` of which `rows` get logits. Nothing is evaluated.

    A layer that the pass does not use at all may have one: it has no effect there, as with mlx-lm.
    """
    module_uses = {id(module): _ModuleUse() for module in modules.values()}
    with swap_classes(
        {id(module): module for module in modules.values()}.values(), partial(_make_recording_class, module_uses)
    ):
        lazy_pass(mx.zeros((_ALL, 1), mx.int32), _PICKED)
    reasons = {}
    for name, module in modules.items():
        if module_uses[id(module)].read:
            reasons[name] = "the model's code reads its weights, and does not only call it"
        elif any(count != _ALL for count in module_uses[id(module)].tokens):
            reasons[name] = "it does not get all tokens of a step, as the layer that gives the logits, or an expert"
    return reasons


@dataclass
class _ModuleUse:
    """How a forward pass used one module."""

    tokens: list[int] = field(default_factory=list)
    """How many tokens each call had."""
    read: bool = False
    """Whether its arrays were read outside of its calls."""
    is_calling: bool = False


def _make_recording_class(module_uses: Mapping[int, _ModuleUse], kind: type[Any]) -> type[Any]:
    """Return a subclass of the module class `kind` that records each use of a module in `module_uses`, by its id."""

    def record_call(module: Any, x: mx.array) -> Any:
        module_use = module_uses[id(module)]
        module_use.tokens.append(x.size // x.shape[-1])
        module_use.is_calling = True
        try:
            return kind.__call__(module, x)
        finally:
            module_use.is_calling = False

    def get_attribute(module: Any, name: str) -> Any:
        value = kind.__getattr__(module, name)
        if isinstance(value, mx.array) and not module_uses[id(module)].is_calling:
            module_uses[id(module)].read = True
        return value

    def get_item(module: Any, name: str) -> Any:
        value = kind.__getitem__(module, name)
        if isinstance(value, mx.array) and not module_uses[id(module)].is_calling:
            module_uses[id(module)].read = True
        return value

    methods = {"__call__": record_call, "__getattr__": get_attribute, "__getitem__": get_item}
    return type(f"Noted{kind.__name__}", (kind,), methods)


# Route: which tokens of a module's input get which slot's product. It is made once per step, for all modules.
#
# The scheduler orders a step's rows by adapter, so the tokens of an adapter are runs. A long run is one product. Short
# runs are gathered: each token is multiplied with its own slot's matrices, in one call for all of them.


NO_SLOT = 0
"""The slot of zeros."""

GATHER_LIMIT = 32
"""Up to so many tokens, all of them are gathered, unless one slot has them all: fewer calls are faster."""

LONG_RUN = 8
"""From so many tokens on, a run is a product of its own."""


@dataclass(frozen=True, eq=False)
class RoutePart:
    """Consecutive tokens `begin .. end` of a layer's input, and their adapter slots. All tokens have `slot`, or
    each has its own in `slots` `[end - begin] uint32`.
    """

    begin: int
    end: int
    slot: int
    slots: mx.array | None = None

    @property
    def is_unchanged(self) -> bool:
        """Whether no adapter changes these tokens."""
        return self.slots is None and self.slot == NO_SLOT


@dataclass(frozen=True, eq=False)
class Route:
    """Which adapter slot each of `tokens` tokens uses, as consecutive parts in order."""

    tokens: int
    parts: tuple[RoutePart, ...]


def make_route(slots: IntArray) -> Route | None:
    """Return the route of tokens with these adapter `slots` `[T]`; None if no token has an adapter."""
    if not slots.any():
        return None
    runs = list(pairwise([0, *(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]))
    if len(runs) == 1:
        return Route(len(slots), (RoutePart(0, len(slots), int(slots[0])),))
    if len(slots) <= GATHER_LIMIT:
        return Route(len(slots), (_make_gathered_part(slots, 0, len(slots)),))
    parts: list[RoutePart] = []
    gathered_start = 0  # of the short runs that are not in a part yet
    for first, end in runs:
        if end - first < LONG_RUN:
            continue
        if gathered_start < first:
            parts.append(_make_gathered_part(slots, gathered_start, first))
        parts.append(RoutePart(first, end, int(slots[first])))
        gathered_start = end
    if gathered_start < len(slots):
        parts.append(_make_gathered_part(slots, gathered_start, len(slots)))
    return Route(len(slots), tuple(parts))


def _make_gathered_part(slots: IntArray, begin: int, end: int) -> RoutePart:
    """Return the part `begin .. end` of a route, in which each token has its own slot."""
    part_slots = slots[begin:end]
    is_uniform = bool((part_slots == part_slots[0]).all())
    return RoutePart(begin, end, int(part_slots[0]), None if is_uniform else mx.array(part_slots.astype(np.uint32)))


# SlotTable: the matrices of several adapters beside one linear layer, and the products with them.


class SlotTable:
    """The LoRA matrices of all adapters of one layer, one slot each: A `[slots, in, rank]` and B `[slots, rank, out]`,
    of one type. Slot 0 holds zeros.

    A product is computed in the table's type. Arrays are never changed in place, so steps in flight keep theirs.
    """

    def __init__(self, ins: int, outs: int, rank: int, dtype: mx.Dtype) -> None:
        self._dtype = dtype
        self._set_matrices(mx.zeros((1, ins, rank), dtype), mx.zeros((1, rank, outs), dtype))

    def _set_matrices(self, a: mx.array, b: mx.array) -> None:
        """Evaluate and take over new matrices A and B."""
        # Views: a slice of consecutive slots shares the table's memory, and an index would copy.
        views = [(a[slot : slot + 1].squeeze(0), b[slot : slot + 1].squeeze(0)) for slot in range(a.shape[0])]
        mx.eval(views)
        self.a, self.b, self._views = a, b, views  # last: the system may refuse the memory

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return int(self.a.nbytes + self.b.nbytes)

    def append(self, slots: int, a: Matrix, b: Matrix) -> None:
        """Make A `[in, r]` and B `[r, out]`, zero-padded to the rank, the last slot, after the first `slots` slots."""
        rank, r = self.a.shape[-1], a.shape[1]
        padded_a = mx.pad(mx.array(a), [(0, 0), (0, rank - r)]).astype(self._dtype)
        padded_b = mx.pad(mx.array(b), [(0, rank - r), (0, 0)]).astype(self._dtype)
        self._set_matrices(
            mx.concatenate([self.a[:slots], padded_a[None]]), mx.concatenate([self.b[:slots], padded_b[None]])
        )

    @property
    def slots(self) -> int:
        """How many slots the table has, slot 0 included."""
        return int(self.a.shape[0])

    def copy_slot(self, slot: int, to: int) -> None:
        """Copy the matrices of `slot` to an earlier slot `to`."""
        a, b = (mx.concatenate([each[:to], each[slot : slot + 1], each[to + 1 :]]) for each in (self.a, self.b))
        self._set_matrices(a, b)

    def keep_first(self, slots: int) -> None:
        """Keep only the first `slots` slots, of which there are at least two: slot 0 and another."""
        if slots < self.slots:
            # Of two parts: one slice would share the memory of all slots.
            a, b = (mx.concatenate([each[:1], each[1:slots]]) for each in (self.a, self.b))
            self._set_matrices(a, b)

    def add_products(self, route: Route, x: mx.array, out: mx.array) -> mx.array:
        """Return a layer's output `out` plus the products of its input `x` with the adapter slots of its tokens. `out`
        is `[..., out]`, and `x` `[..., in]`. The tokens are those of the route, in order, whatever the leading
        axes.
        """
        if len(route.parts) == 1:
            return self._add_part(route.parts[0], x, out)
        rows, results = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1])
        parts = []
        for part in route.parts:
            part_output = results[part.begin : part.end]
            parts.append(
                part_output if part.is_unchanged else self._add_part(part, rows[part.begin : part.end], part_output)
            )
        return mx.concatenate(parts).reshape(out.shape)

    def _add_part(self, part: RoutePart, x: mx.array, out: mx.array) -> mx.array:
        """Return the output of one part of a route, with the products of its slots added."""
        if part.slots is None:
            a, b = self._views[part.slot]
            if x.dtype == out.dtype == self._dtype:
                return mx.addmm(out, x @ a, b)
            return out + ((x.astype(self._dtype) @ a) @ b).astype(out.dtype)
        rows = x.reshape(-1, 1, x.shape[-1]).astype(self._dtype)
        low_rank = mx.gather_mm(rows, self.a, rhs_indices=part.slots)
        return out + mx.gather_mm(low_rank, self.b, rhs_indices=part.slots).reshape(out.shape).astype(out.dtype)
