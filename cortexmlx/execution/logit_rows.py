"""Projects only the tokens that need logits to the vocabulary.

mlx-lm's models project every token of a step. For a prefill of hundreds of tokens and a vocabulary of tens of
thousands, that costs as much as several layers. Almost all models normalise once more before they project. So one
forward pass that is never evaluated notes which norm runs last, after all attention. That norm is wrapped, and the
wrapper drops the tokens that need no logits. A second such pass checks that nothing after it needs them. If the norm is
no module, the output of the part that contains all layers is wrapped. If that fails, too, everything is projected, and
the rows are picked afterwards.

If very many tokens need logits, a pass keeps what reaches the wrapper. Later passes get some of these rows instead, and
only what comes after the wrapper is evaluated. So the model's own code projects a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

LazyPass = Callable[[nn.Module, mx.array, Callable[[], None]], mx.array]
"""`lazy_pass(model, tokens, attended)` runs a model over tokens `[T, 1]`, and calls `attended` at each layer's
attention. It returns logits `[T, 1, vocab]` that must not be evaluated.
"""

_ATTENTION = ""
_TOKENS, _ROWS = 3, (0, 2)
"""A pass of three tokens, of which two are picked: neither is 1, so that no shape fits another by broadcasting."""


class LogitRows:
    """Runs a model and returns the logits of chosen flat tokens."""

    def __init__(self, model: nn.Module, lazy_pass: LazyPass) -> None:
        self._model = model
        self._lazy_pass = lazy_pass
        self._pick = _find(model, lazy_pass)

    def run(self, tokens: mx.array, caches: Sequence[Any], rows: npt.NDArray[np.int32]) -> mx.array:
        """Return the logits `[len(rows), vocab]` of the flat tokens `[T, 1]`. Without rows, the returned logits must
        not be evaluated.
        """
        return self._run(tokens, caches, rows, None)[0]

    def run_keeping(
        self, tokens: mx.array, caches: Sequence[Any], rows: npt.NDArray[np.int32], kept: npt.NDArray[np.int32]
    ) -> tuple[mx.array, mx.array]:
        """Return these logits, and what `project` needs for the tokens `kept`, `[len(kept), ...]`."""
        return self._run(tokens, caches, rows, mx.array(kept))

    def project(self, kept: mx.array) -> mx.array:
        """Return the logits `[n, vocab]` of `n` rows of what `run_keeping` returned."""
        if self._pick is None:
            return kept
        with self._pick.given(kept):
            return self._lazy_pass(self._model, mx.zeros((1, 1), mx.int32), _nothing)[:, 0]

    def ends_body(self) -> bool:
        """Return whether the model's body, the part of it that has the norm whose input is kept, returns just what that
        norm returns. If so, `states` gives the model's last hidden states. Nothing is computed.
        """
        path = next((path for path, module in self._model.named_modules() if module is self._pick), "")
        parent = path.rpartition(".")[0]
        if self._pick is None or isinstance(self._pick, _PickOutput) or not parent:
            return False
        body = dict(self._model.named_modules())[parent]
        place, returned, norm = _place(self._model, parent), list[Any](), self._pick.norm
        place(_Returning(body, returned.append))
        self._pick["norm"] = _Returning(norm, returned.append)
        try:
            self._lazy_pass(self._model, mx.zeros((_TOKENS, 1), mx.int32), _nothing)
        finally:
            self._pick["norm"] = norm
            place(body)
        return len(returned) > 1 and returned[-1] is returned[-2]

    def states(self, kept: mx.array) -> mx.array:
        """Return the hidden states `[n, width]`, behind the last norm, of `n` rows of what `run_keeping` returned. See
        `ends_body`.
        """
        assert self._pick is not None
        states: mx.array = self._pick.norm(kept)[:, 0]
        return states

    def lazy(self, tokens: mx.array, rows: Sequence[int]) -> mx.array:
        """Build a pass over flat tokens `[T, 1]`, all at position 0, of which `rows` get logits. The model must have
        been probed, and the logits must not be evaluated.
        """
        if self._pick is not None:
            self._pick.pick(mx.array(list(rows)))
        try:
            return self._lazy_pass(self._model, tokens, _nothing)
        finally:
            if self._pick is not None:
                self._pick.pick(None)

    def _run(
        self, tokens: mx.array, caches: Sequence[Any], rows: npt.NDArray[np.int32], kept: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        everything = len(rows) in (0, tokens.shape[0])
        picked = None if everything else mx.array(rows)
        if self._pick is None or (picked is None and kept is None):
            logits: mx.array = self._model(tokens, cache=caches)[:, 0]
            return logits if picked is None else logits[picked], logits if kept is None else logits[kept]
        self._pick.pick(picked, kept)
        try:
            logits = self._model(tokens, cache=caches)[:, 0]
            return logits, logits if kept is None else self._pick.kept
        finally:
            self._pick.pick(None)  # it keeps no array of the pass


class _Wrapped(nn.Module):  # type: ignore[misc]
    """Replaces a norm, and has the norm's attributes, since some models read its weight."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self["norm"] = norm

    def __getattr__(self, name: str) -> Any:
        return self[name] if name in self else getattr(self["norm"], name)


@dataclass
class RowSelection:
    """What happens with the rows of one pass. It is no module, so its arrays are no parameters."""

    calls_left: int
    """How many calls of the norm are left until the one at which rows are picked."""
    rows: mx.array | None = None
    """The rows that are passed on; None: all."""
    wanted: mx.array | None = None
    """The rows to keep."""
    kept: mx.array | None = None
    given: mx.array | None = None
    """What is passed on instead of the input."""

    def handed_on(self, x: mx.array) -> mx.array:
        if self.given is not None:
            return self.given
        if self.wanted is not None:
            self.kept = x[self.wanted]
        return x if self.rows is None else x[self.rows]


class _PickRows(_Wrapped):
    """A norm that first drops the rows that need no logits, at the last of its `calls` in a pass."""

    def __init__(self, norm: nn.Module, calls: int) -> None:
        super().__init__(norm)
        self._calls = calls
        self._picking = RowSelection(calls)

    def pick(self, rows: mx.array | None, wanted: mx.array | None = None) -> None:
        """Pass on only `rows` in the next pass (None: all), and keep the rows `wanted`."""
        self._picking = RowSelection(self._calls, rows, wanted)

    @property
    def kept(self) -> mx.array:
        """The wanted rows of the last pass."""
        assert self._picking.kept is not None
        return self._picking.kept

    @contextmanager
    def given(self, kept: mx.array) -> Iterator[None]:
        """Pass on `kept` instead of the input."""
        self._picking = RowSelection(self._calls, given=kept)
        try:
            yield
        finally:
            self._picking = RowSelection(self._calls)

    def __call__(self, x: mx.array) -> mx.array:
        picking = self._picking
        picking.calls_left -= 1
        if picking.calls_left == 0:
            x = picking.handed_on(x)
        out: mx.array = self["norm"](x)
        return out


class _PickOutput(_PickRows):
    """A part of the model that drops the rows of its output that need no logits."""

    def __call__(self, *inputs: Any, **others: Any) -> Any:
        return self._picking.handed_on(self["norm"](*inputs, **others))


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model, by the names that they have without the wrapper of a `LogitRows`."""
    every = model.named_modules()
    wrappers = [f"{path}.norm" for path, module in every if isinstance(module, _PickRows)]
    for name, module in every:
        inside = next((path for path in wrappers if name == path or name.startswith(f"{path}.")), None)
        if not isinstance(module, _PickRows):
            yield (name if inside is None else inside.removesuffix(".norm") + name[len(inside) :]), module


class _Noted(_Wrapped):
    """A norm, or a part, that reports each of its calls, and each return."""

    def __init__(self, norm: nn.Module, note: Callable[[], None], after: Callable[[], None]) -> None:
        super().__init__(norm)
        self._note, self._after = note, after

    def __call__(self, *inputs: Any, **others: Any) -> Any:
        self._note()
        out = self.norm(*inputs, **others)
        self._after()
        return out


class _Returning(_Wrapped):
    """A norm, or a part, that reports what each of its calls returns."""

    def __init__(self, norm: nn.Module, note: Callable[[Any], None]) -> None:
        super().__init__(norm)
        self._note = note

    def __call__(self, *inputs: Any, **others: Any) -> Any:
        out = self["norm"](*inputs, **others)
        self._note(out)
        return out


def _find(model: nn.Module, lazy_pass: LazyPass) -> _PickRows | None:
    """Wrap the module whose output is projected, and return the wrapper. None if nothing can be wrapped."""
    for path, module in model.named_modules():
        if isinstance(module, _PickRows):  # of a runner that had the model before
            _place(model, path)(module.norm)
    return _last_norm(model, lazy_pass) or _body(model, lazy_pass)


def _last_norm(model: nn.Module, lazy_pass: LazyPass) -> _PickRows | None:
    """Wrap the norm that runs last, after all attention."""
    norms = {path: module for path, module in model.named_modules() if "Norm" in type(module).__name__}
    places = {path: _place(model, path) for path in norms}  # before any is wrapped: there are norms in norms
    tokens = mx.zeros((_TOKENS, 1), mx.int32)
    order = [_ATTENTION]
    for path, norm in norms.items():
        places[path](_Noted(norm, partial(order.append, path), _nothing))
    try:
        lazy_pass(model, tokens, partial(order.append, _ATTENTION))
    finally:
        for path, norm in norms.items():
            places[path](norm)
    last = order[-1]
    if last == _ATTENTION:
        return None
    return _kept(model, lazy_pass, _PickRows(norms[last], order.count(last)), places[last])


def _body(model: nn.Module, lazy_pass: LazyPass) -> _PickRows | None:
    """Wrap the part of the model, one level down, in whose one call all attention happens."""
    parts = {name: part for name, part in model.children().items() if isinstance(part, nn.Module)}
    order: list[str] = []
    for name, part in parts.items():
        model[name] = _Noted(part, partial(order.append, f"{name} ("), partial(order.append, f"{name} )"))
    try:
        lazy_pass(model, mx.zeros((_TOKENS, 1), mx.int32), partial(order.append, _ATTENTION))
    finally:
        for name, part in parts.items():
            model[name] = part
    calls = order.count(_ATTENTION)
    for name, part in parts.items():
        if order.count(f"{name} (") == 1:
            inside = order[order.index(f"{name} (") : order.index(f"{name} )")]
            if inside.count(_ATTENTION) == calls > 0:
                return _kept(model, lazy_pass, _PickOutput(part, 1), _place(model, name))
    return None


def _kept(
    model: nn.Module, lazy_pass: LazyPass, pick: _PickRows, place: Callable[[nn.Module], None]
) -> _PickRows | None:
    """Put `pick` in its place and return it, unless something after it needs the rows that it drops. Then undo it and
    return None.
    """
    place(pick)
    pick.pick(mx.array(_ROWS))
    try:
        fits = lazy_pass(model, mx.zeros((_TOKENS, 1), mx.int32), _nothing).shape[:2] == (len(_ROWS), 1)
    except Exception:  # what comes after it needs every token, and raises anything
        fits = False
    pick.pick(None)
    if not fits:
        place(pick.norm)
    return pick if fits else None


def _nothing() -> None:
    pass


def _place(model: nn.Module, path: str) -> Callable[[nn.Module], None]:
    """Return a function that puts a module at the place that `named_modules` calls `path`."""
    *way, name = path.split(".")
    parent: Any = model
    for step in way:
        parent = parent[int(step)] if isinstance(parent, list) else parent[step]
    return partial(parent.__setitem__, int(name) if isinstance(parent, list) else name)
