"""Loading: from a name to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cortexmlx.errors import ModelNotFound
from cortexmlx.models.loaded import LoadedModel
from cortexmlx.models.resolve import ModelSource, SourceKind, resolve

Progress = Callable[[str, float], None]


def load_model(name: str | Path, *, dequantize: bool | None = None, on_progress: Progress | None = None) -> LoadedModel:
    """Resolve `name` and load it, on the thread that will run it (MLX's streams belong to threads).

    `dequantize`: True makes the weights float32, False leaves them as stored, None decides (float32 on a Linux CPU when it
    takes under a quarter of the memory). `on_progress(what, fraction)` is called on this thread.
    Raises ModelNotFound, ModelCorrupt or ModelUnsupported.
    """
    from cortexmlx import blas

    blas.preload()
    report = on_progress or (lambda what, fraction: None)
    source = resolve(name)
    report("loading weights", 0.0)
    model, tokenizer, config, notes = _read(source)
    return _finish(source, model, tokenizer, config, notes, dequantize, report)


def _read(source: ModelSource) -> tuple[Any, Any, dict[str, Any], tuple[str, ...]]:
    if source.kind in (SourceKind.GGUF, SourceKind.STARTER):
        from cortexmlx.models.gguf import load_gguf

        assert source.path is not None
        return load_gguf(source.path)
    raise ModelNotFound(f"cannot load {source.name}")


def _finish(
    source: ModelSource,
    model: Any,
    tokenizer: Any,
    config: dict[str, Any],
    notes: tuple[str, ...],
    dequantize: bool | None,
    report: Progress,
) -> LoadedModel:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import get_total_parameters

    from cortexmlx.models.memory import should_dequantize, to_float32

    parameters = int(get_total_parameters(model))
    if should_dequantize(parameters) if dequantize is None else dequantize:
        before = _weight_bytes(model)
        report("making the weights float32", 0.5)
        to_float32(model)
        after = _weight_bytes(model)
        if after != before:
            notes += (f"weights are float32 in memory ({after / 1e6:.0f} MB, {before / 1e6:.0f} MB as stored)",)
    report("loading weights", 1.0)
    floats = [a.dtype for _, a in tree_flatten(model.parameters()) if mx.issubdtype(a.dtype, mx.floating)]
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        name=source.name,
        path=source.path or Path(),
        context_length=int(config.get("max_position_embeddings") or 2048),
        weight_bytes=_weight_bytes(model),
        parameters=parameters,
        dtype=str(floats[0]).removeprefix("mlx.core."),
        notes=notes,
    )


def _weight_bytes(model: Any) -> int:
    from mlx.utils import tree_flatten

    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))
