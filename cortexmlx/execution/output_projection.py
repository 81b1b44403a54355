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


class OutputProjection:
    """Runs a model, and projects only chosen tokens of a step to logits."""

    def __init__(self, model: nn.Module, lazy_pass: LazyPass) -> None:
        self._model = model
        self._lazy_pass = lazy_pass
        self._pick = _wrap_projection_input(model, lazy_pass)

    def run(
        self, tokens: mx.array, caches: Sequence[Any], rows: npt.NDArray[np.int32], embeddings: mx.array | None = None
    ) -> mx.array:
        """Run a pass over flat tokens `[T, 1]`, and return the logits `[len(rows), vocab]` of the tokens `rows`.
        Without rows, the returned logits must not be evaluated. `embeddings` `[T, 1, h]` replace the tokens' own.
        """
        return self._run(tokens, caches, rows, None, embeddings)[0]

    def run_keeping(
        self,
        tokens: mx.array,
        caches: Sequence[Any],
        rows: npt.NDArray[np.int32],
        kept_indices: npt.NDArray[np.int32],
        embeddings: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Run a pass as `run` does, and also return the input of `project` for the tokens `kept_indices`, `[len(kept),
        ...]`: their hidden states, or their logits if no module of this model could be wrapped.
        """
        return self._run(tokens, caches, rows, mx.array(kept_indices), embeddings)

    def project(self, kept_states: mx.array) -> mx.array:
        """Return the logits `[n, vocab]` of `n` rows of what `run_keeping` returned."""
        if self._pick is None:
            return kept_states
        with self._pick.replace_input(kept_states):
            return self._lazy_pass(self._model, mx.zeros((1, 1), mx.int32), _do_nothing)[:, 0]

    def has_hidden_states(self) -> bool:
        """Return whether `hidden_states` gives the model's last hidden states. It does if the wrapped norm is the last
        operation of the module that contains it. Nothing is computed.
        """
        path = next((path for path, module in self._model.named_modules() if module is self._pick), "")
        parent = path.rpartition(".")[0]
        if self._pick is None or isinstance(self._pick, _OutputRowPicker) or not parent:
            return False
        body = dict(self._model.named_modules())[parent]
        set_module, outputs, norm = _module_setter(self._model, parent), list[Any](), self._pick.norm
        set_module(_OutputRecorder(body, outputs.append))
        self._pick["norm"] = _OutputRecorder(norm, outputs.append)
        try:
            self._lazy_pass(self._model, mx.zeros((_TOKENS, 1), mx.int32), _do_nothing)
        finally:
            self._pick["norm"] = norm
            set_module(body)
        return len(outputs) > 1 and outputs[-1] is outputs[-2]

    def hidden_states(self, kept_states: mx.array) -> mx.array:
        """Return the last norm's output `[n, width]` for `n` rows from `run_keeping`. See `has_hidden_states`."""
        assert self._pick is not None
        states: mx.array = self._pick.norm(kept_states)[:, 0]
        return states

    def build_lazy_pass(self, tokens: mx.array, rows: Sequence[int]) -> mx.array:
        """Build a pass over flat tokens `[T, 1]`, all at position 0, of which `rows` get logits. The model must have
        been probed, and the logits must not be evaluated.
        """
        if self._pick is not None:
            self._pick.set_rows(mx.array(list(rows)))
        try:
            return self._lazy_pass(self._model, tokens, _do_nothing)
        finally:
            if self._pick is not None:
                self._pick.set_rows(None)

    def _run(
        self,
        tokens: mx.array,
        caches: Sequence[Any],
        rows: npt.NDArray[np.int32],
        kept_indices: mx.array | None,
        embeddings: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        """Return the logits of the tokens at indices `rows`, and the input of `project` for those at `kept_indices`."""
        inputs = {} if embeddings is None else {"input_embeddings": embeddings}
        wants_all_rows = len(rows) in (0, tokens.shape[0])
        row_indices = None if wants_all_rows else mx.array(rows)
        if self._pick is None or (row_indices is None and kept_indices is None):
            logits: mx.array = self._model(tokens, cache=caches, **inputs)[:, 0]
            return logits if row_indices is None else logits[row_indices], logits if kept_indices is None else logits[
                kept_indices
            ]
        self._pick.set_rows(row_indices, kept_indices)
        try:
            logits = self._model(tokens, cache=caches, **inputs)[:, 0]
            return logits, logits if kept_indices is None else self._pick.kept_rows
        finally:
            self._pick.set_rows(None)  # it keeps no array of the pass


class _ModuleWrapper(nn.Module):  # type: ignore[misc]
    """Replaces a module, and passes its attributes on, since some models read a norm's weight."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self["norm"] = norm

    def __getattr__(self, name: str) -> Any:
        return self[name] if name in self else getattr(self["norm"], name)


@dataclass
class RowSelection:
    """Which rows a wrapped module passes on and keeps in one pass. It is no nn.Module: its arrays are no parameters."""

    calls_left: int
    """How many calls of the norm are left until the one at which rows are picked."""
    rows: mx.array | None = None
    """The rows that are passed on; None: all."""
    kept_indices: mx.array | None = None
    """The rows to keep."""
    kept_states: mx.array | None = None
    replacement: mx.array | None = None
    """What is passed on instead of the input."""

    def select_rows(self, x: mx.array) -> mx.array:
        """Return the rows of `x` that are passed on, and keep the rows `kept_indices`."""
        if self.replacement is not None:
            return self.replacement
        if self.kept_indices is not None:
            self.kept_states = x[self.kept_indices]
        return x if self.rows is None else x[self.rows]


class _RowPicker(_ModuleWrapper):
    """Wraps a norm that is called `calls` times in a pass. In the last call it drops the rows that need no logits."""

    def __init__(self, norm: nn.Module, calls: int) -> None:
        super().__init__(norm)
        self._calls = calls
        self._selection = RowSelection(calls)

    def set_rows(self, rows: mx.array | None, kept_indices: mx.array | None = None) -> None:
        """Pass on only `rows` in the next pass (None: all), and keep the rows `kept_indices`."""
        self._selection = RowSelection(self._calls, rows, kept_indices)

    @property
    def kept_rows(self) -> mx.array:
        """The rows of the last pass that `set_rows` asked to keep."""
        assert self._selection.kept_states is not None
        return self._selection.kept_states

    @contextmanager
    def replace_input(self, replacement: mx.array) -> Iterator[None]:
        """Context: the wrapped norm gets `replacement` as its input, whatever the model computed."""
        self._selection = RowSelection(self._calls, replacement=replacement)
        try:
            yield
        finally:
            self._selection = RowSelection(self._calls)

    def __call__(self, x: mx.array) -> mx.array:
        selection = self._selection
        selection.calls_left -= 1
        if selection.calls_left == 0:
            x = selection.select_rows(x)
        out: mx.array = self["norm"](x)
        return out


class _OutputRowPicker(_RowPicker):
    """Wraps a part of the model, and drops the rows of its output that need no logits."""

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._selection.select_rows(self["norm"](*inputs, **kwargs))


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model under their original names, without the wrapper of an `OutputProjection`."""
    all_modules = model.named_modules()
    wrappers = [f"{path}.norm" for path, module in all_modules if isinstance(module, _RowPicker)]
    for name, module in all_modules:
        wrapper_path = next((path for path in wrappers if name == path or name.startswith(f"{path}.")), None)
        if not isinstance(module, _RowPicker):
            yield (
                (name if wrapper_path is None else wrapper_path.removesuffix(".norm") + name[len(wrapper_path) :]),
                module,
            )


class _CallRecorder(_ModuleWrapper):
    """Wraps a module, and reports the begin and end of each of its calls."""

    def __init__(self, norm: nn.Module, on_call: Callable[[], None], on_return: Callable[[], None]) -> None:
        super().__init__(norm)
        self._on_call, self._on_return = on_call, on_return

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        self._on_call()
        out = self.norm(*inputs, **kwargs)
        self._on_return()
        return out


class _OutputRecorder(_ModuleWrapper):
    """Wraps a module, and reports what each of its calls returns."""

    def __init__(self, norm: nn.Module, on_output: Callable[[Any], None]) -> None:
        super().__init__(norm)
        self._on_output = on_output

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        out = self["norm"](*inputs, **kwargs)
        self._on_output(out)
        return out


def _wrap_projection_input(model: nn.Module, lazy_pass: LazyPass) -> _RowPicker | None:
    """Wrap the module whose output is projected to logits, and return the wrapper. None if nothing can be wrapped."""
    for path, module in model.named_modules():
        if isinstance(module, _RowPicker):  # of a runner that had the model before
            _module_setter(model, path)(module.norm)
    return _wrap_last_norm(model, lazy_pass) or _wrap_body(model, lazy_pass)


def _wrap_last_norm(model: nn.Module, lazy_pass: LazyPass) -> _RowPicker | None:
    """Wrap the norm that runs last, after all attention."""
    norms = {path: module for path, module in model.named_modules() if "Norm" in type(module).__name__}
    module_setters = {
        path: _module_setter(model, path) for path in norms
    }  # before any is wrapped: there are norms in norms
    tokens = mx.zeros((_TOKENS, 1), mx.int32)
    order = [_ATTENTION]
    for path, norm in norms.items():
        module_setters[path](_CallRecorder(norm, partial(order.append, path), _do_nothing))
    try:
        lazy_pass(model, tokens, partial(order.append, _ATTENTION))
    finally:
        for path, norm in norms.items():
            module_setters[path](norm)
    last = order[-1]
    if last == _ATTENTION:
        return None
    return _wrap_if_rows_suffice(model, lazy_pass, _RowPicker(norms[last], order.count(last)), module_setters[last])


def _wrap_body(model: nn.Module, lazy_pass: LazyPass) -> _RowPicker | None:
    """Wrap the model's child module that does all attention within one call."""
    parts = {name: part for name, part in model.children().items() if isinstance(part, nn.Module)}
    order: list[str] = []
    for name, part in parts.items():
        model[name] = _CallRecorder(part, partial(order.append, f"{name} ("), partial(order.append, f"{name} )"))
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
                return _wrap_if_rows_suffice(model, lazy_pass, _OutputRowPicker(part, 1), _module_setter(model, name))
    return None


def _wrap_if_rows_suffice(
    model: nn.Module, lazy_pass: LazyPass, pick: _RowPicker, set_module: Callable[[nn.Module], None]
) -> _RowPicker | None:
    """Put `pick` in place and return it. If the rest of the model needs rows that it drops, undo this; return None."""
    set_module(pick)
    pick.set_rows(mx.array(_ROWS))
    try:
        rows_suffice = lazy_pass(model, mx.zeros((_TOKENS, 1), mx.int32), _do_nothing).shape[:2] == (len(_ROWS), 1)
    except Exception:  # what comes after it needs every token, and raises anything
        rows_suffice = False
    pick.set_rows(None)
    if not rows_suffice:
        set_module(pick.norm)
    return pick if rows_suffice else None


def _do_nothing() -> None:
    """Do nothing: the callback of a lazy pass whose attention calls do not matter."""
    pass


def _module_setter(model: nn.Module, path: str) -> Callable[[nn.Module], None]:
    """Return a function that replaces the module of this path (as in `named_modules`)."""
    *parent_path, name = path.split(".")
    parent: Any = model
    for key in parent_path:
        parent = parent[int(key)] if isinstance(parent, list) else parent[key]
    return partial(parent.__setitem__, int(name) if isinstance(parent, list) else name)
