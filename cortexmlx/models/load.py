"""Load a model: from a name to a model that is ready to run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortexmlx.errors import ModelUnsupported
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.models.adapters.files import find_adapter_file, read_adapter
from cortexmlx.models.folder_config import (
    ASSISTANT,
    context_length_or_default,
    head_prefix,
    is_same_model,
    read_config,
    read_recommended_sampling,
)
from cortexmlx.models.inventory import stored_bytes, weight_files
from cortexmlx.models.loaded import LoadedModel
from cortexmlx.models.resolve import STARTER_SAMPLING, ResolvedModel, SourceKind, resolve_model
from cortexmlx.system.machine import memory_bytes, working_set_bytes
from cortexmlx.types.arrays import dtype_name
from cortexmlx.types.progress import OnProgress, Progress

if TYPE_CHECKING:
    from cortexmlx.models.weights_hash import WeightsHash

log = logging.getLogger(__name__)

DEQUANTIZE_SWITCH = "CORTEXMLX_DEQUANTIZE"

LOADING_STEPS = 3
"""Read the files, apply an adapter, widen the weights."""


def load_model(
    name: str | Path,
    *,
    adapter: str | Path | None = None,
    dequantize: bool | None = None,
    on_progress: OnProgress | None = None,
    weights_hash: WeightsHash | None = None,
    on_built: Callable[[Any], None] = lambda model: None,
    evaluate_part: Callable[[Any], object] | None = None,
) -> LoadedModel:
    """Resolve `name` and load the model, on the thread that will run it (MLX's streams belong to threads).

    `adapter` is the folder of a LoRA or DoRA adapter, or of fine-tuned layers, that is put into the model.

    `dequantize`: True makes the weights float32, and False leaves them as stored. None makes them float32 on a Linux
    CPU if that takes less than a quarter of the memory, unless `CORTEXMLX_DEQUANTIZE=0` is in the environment.

    `on_progress(progress)` is called on this thread.

    `weights_hash` begins before the files are read, and learns which arrays were made from them.

    `on_built(model)` is called with the model of a folder before its weights are read: see `load_folder`. It must not
    raise.

    `evaluate_part(model)` cuts a model whose weights have not been read to a part, and evaluates that: see
    `models/sharding`. Without it, the whole model is evaluated.

    Raises ModelNotFound, ModelCorrupt or ModelUnsupported.
    """
    from cortexmlx.cpu import blas
    from cortexmlx.mlx_lm.package import enter_mlx_lm

    blas.preload()
    enter_mlx_lm()
    report = on_progress or (lambda progress: None)
    source = resolve_model(name)
    loaded_adapter = None if adapter is None else read_adapter(adapter)
    slow_below_float32 = _is_float32_faster()
    float32 = slow_below_float32 or dequantize is True
    path = fetch_model(source, report)
    if weights_hash is not None:
        weights_hash.begin(
            [*weight_files(path), *([] if loaded_adapter is None else [loaded_adapter.weights])], f"float32={float32}"
        )
    model, tokenizer, config, notes = _load_files(
        path, source.kind, float32, report, on_built, lazy=evaluate_part is not None
    )
    try:
        report(Progress("loading", 1, LOADING_STEPS))
        if loaded_adapter is None:
            notes += note_unused_adapter(path)
        else:
            from cortexmlx.models.adapters.apply import apply_adapter

            notes += (apply_adapter(model, loaded_adapter),)
        report(Progress("loading", 2, LOADING_STEPS))
        notes += _widen_to_float32(model, path, slow_below_float32, dequantize)
        _evaluate(model, path, evaluate_part)
        notes += blas.notes() if slow_below_float32 else ()
        sampling, sampling_notes = find_recommended_sampling(source.kind, path)
        notes += sampling_notes
        if weights_hash is not None:
            weights_hash.hold_arrays(model)
        report(Progress("loading", LOADING_STEPS, LOADING_STEPS))
        loaded_model = _make_loaded_model(
            source.name, path, model, tokenizer, config, notes, None if loaded_adapter is None else loaded_adapter.path
        )
        return replace(loaded_model, sampling=sampling)
    except BaseException:
        from cortexmlx.models import weights

        weights.release_arrays(model)
        raise


def load_without_weights(
    name: str | Path, *, adapter: str | Path | None = None, on_progress: OnProgress | None = None
) -> LoadedModel:
    """Load a model's tokenizer, configuration and recommended sampling, while other processes hold its weights. Sizes
    are 0 and the dtype is empty, for the caller to replace.

    Parameters and errors are those of `load_model`.
    """
    from cortexmlx.mlx_lm.package import enter_mlx_lm

    enter_mlx_lm()
    report = on_progress or (lambda progress: None)
    source = resolve_model(name)
    adapter_path = None if adapter is None else read_adapter(adapter).path
    path = fetch_model(source, report)
    if source.kind in (SourceKind.GGUF, SourceKind.STARTER):
        from cortexmlx.models.gguf.load import load_gguf_without_weights

        tokenizer, config, notes = load_gguf_without_weights(path)
    else:
        from cortexmlx.models.folder import load_folder_without_weights

        tokenizer, config, notes = load_folder_without_weights(path)
    context, context_notes = context_length_or_default(config)
    sampling, sampling_notes = find_recommended_sampling(source.kind, path)
    return LoadedModel(
        model=None,
        tokenizer=tokenizer,
        config=config,
        name=source.name,
        path=path,
        context_length=context,
        weight_bytes=0,
        parameters=0,
        dtype="",
        notes=(*notes, *(note_unused_adapter(path) if adapter_path is None else ()), *sampling_notes, *context_notes),
        adapter=adapter_path,
        sampling=sampling,
    )


def _is_float32_faster() -> bool:
    """Return whether MLX computes faster in float32: on a Linux CPU, only float32 matrix products use BLAS."""
    import mlx.core as mx

    return sys.platform == "linux" and mx.default_device() == mx.cpu


def _load_files(
    path: Path, kind: SourceKind, float32: bool, report: OnProgress, on_built: Callable[[Any], None], lazy: bool
) -> tuple[Any, Any, dict[str, Any], tuple[str, ...]]:
    """Load a GGUF file or a folder: return the model, tokenizer, config and notes."""
    report(Progress("loading", 0, LOADING_STEPS))
    if kind in (SourceKind.GGUF, SourceKind.STARTER):
        from cortexmlx.models.gguf.load import load_gguf

        return load_gguf(path, float32)
    from cortexmlx.models.folder import load_folder

    return load_folder(path, on_built, lazy=lazy)


def _evaluate(model: Any, path: Path, evaluate_part: Callable[[Any], object] | None) -> None:
    """Evaluate the model's weights, or have `evaluate_part` cut the model to a part and evaluate that.

    MLX's random state is evaluated, too. A model class draws weights when it is built, and the files' weights take
    their place. What is never drawn stays as a chain of keys in memory, 64 KB a model, also after its thread has ended.
    """
    import mlx.core as mx

    from cortexmlx.models.weights import weight_bytes

    mx.eval(mx.random.state)
    if evaluate_part is None:
        size, budget = weight_bytes(model), working_set_bytes()
        if size > budget:
            sizes = f"the weights of {path.name} take {format_bytes(size)}, and this machine has {format_bytes(budget)}"
            log.warning("%s for models: it may be very slow, or fail. `cortexmlx plan` says what fits", sizes)
        mx.eval(model.parameters())
        return
    from cortexmlx.models.folder import translate_weight_errors

    with translate_weight_errors(path):
        evaluate_part(model)


def find_recommended_sampling(kind: SourceKind, path: Path) -> tuple[Mapping[str, float], tuple[str, ...]]:
    """Return the sampling parameters that the model's makers recommend, and notes on those that cannot be used."""
    if kind is SourceKind.STARTER:
        return STARTER_SAMPLING, ()
    return read_recommended_sampling(path) if path.is_dir() else ({}, ())


def fetch_model(source: ResolvedModel, report: OnProgress) -> Path:
    """Return the path of a model's files. They are downloaded if they are not on this machine: see `fetch_repo`."""
    if source.path is not None:
        return source.path
    from cortexmlx.models.folder import check_folder_config
    from cortexmlx.models.hub import fetch_repo

    return fetch_repo(source.name, report, check_folder_config)


def find_head_folder(draft: str | Path, model: str | Path, report: OnProgress) -> Path | None:
    """Return the folder of the assistant or draft head that `draft` names; None if it names a whole draft model. A
    draft head is in another checkpoint of `model`. What is missing is downloaded: an assistant, or the checkpoint's
    files with the head. Raises ModelNotFound, ModelCorrupt or DownloadFailed.
    """
    from cortexmlx.models.hub import fetch_config, fetch_tensor_files

    sources = resolve_model(draft), resolve_model(model)
    if any(source.kind in (SourceKind.GGUF, SourceKind.STARTER) for source in sources):
        return None
    config, model_config = (read_config(source.path or fetch_config(source.name)) for source in sources)
    if config["model_type"] == ASSISTANT:
        return fetch_model(sources[0], report)
    prefix = head_prefix(config)
    if prefix is None or not is_same_model(config, model_config):
        return None
    return sources[0].path or fetch_tensor_files(sources[0].name, lambda name: bool(prefix.match(name)), report)


def fetch_draft(draft: str | Path, model: str | Path, report: OnProgress) -> None:
    """Download the assistant, draft head or draft model `draft` if missing. Raises what `find_head_folder` raises."""
    if find_head_folder(draft, model, report) is None:
        fetch_model(resolve_model(draft), report)


def check_model(name: str | Path, report: OnProgress) -> None:
    """Check a model without loading it: its files exist, and those of a folder are whole. Download it if it is missing.
    Raises ModelNotFound, ModelCorrupt or ModelUnsupported for faults that can be seen without reading the weights.
    """
    path = fetch_model(resolve_model(name), report)
    if path.is_dir():
        from cortexmlx.models.folder import check_folder_config
        from cortexmlx.models.safetensors_check import check_weights

        check_folder_config(path)
        check_weights(path)


def note_unused_adapter(path: Path) -> tuple[str, ...]:
    """Return a note if an adapter lies in the model's folder, where it is not used."""
    adapter_file = find_adapter_file(path)
    return (f"{adapter_file} lies beside the model and is not used: --adapter {path} does",) if adapter_file else ()


def is_float32_affordable(parameters: int, memory: int) -> bool:
    """Return whether float32 weights take under a quarter of `memory` bytes and `CORTEXMLX_DEQUANTIZE` allows them."""
    return os.environ.get(DEQUANTIZE_SWITCH) != "0" and parameters * 4 < memory / 4


def _widen_to_float32(model: Any, path: Path, slow_below_float32: bool, dequantize: bool | None) -> tuple[str, ...]:
    """Convert weights or activations to float32 where this is requested or faster. Return notes on what was done.

    Where float32 is not faster (on a GPU, on macOS) the model stays as it is stored.
    """
    from cortexmlx.models import weights

    if dequantize is None:
        dequantize = slow_below_float32 and is_float32_affordable(weights.parameter_count(model), memory_bytes())
    packed_size = weights.weight_bytes(model)
    if slow_below_float32 and weights.quantizes_activations(model):
        raise ModelUnsupported(
            "MLX's CPU build does not compute layers that quantize their activations, as config.json asks "
            "(quantize_activations)."
        )
    if dequantize:
        weights.convert_to_float32(model)
        float32_size = weights.weight_bytes(model)
        if float32_size == packed_size:
            return ()
        stored_size = stored_bytes(path)
        return (
            f"weights are float32 in memory, for speed: {format_bytes(float32_size)}, stored in "
            f"{format_bytes(stored_size)}",
        )
    if not slow_below_float32:
        return ()
    if unsupported_layers := weights.find_unsupported_on_cpu(model):
        size = format_bytes(weights.parameter_count(model) * 4)
        raise ModelUnsupported(
            f"MLX's CPU build does not compute {unsupported_layers} as they are packed. As float32 the model takes "
            f"{size}: Engine(..., dequantize=True) does that."
        )
    weights.convert_activations_to_float32(model)
    return ("weights stay quantized, which is slow on a CPU",) if weights.is_quantized(model) else ()


def _make_loaded_model(
    name: str,
    path: Path,
    model: Any,
    tokenizer: Any,
    config: dict[str, Any],
    notes: tuple[str, ...],
    adapter: Path | None,
) -> LoadedModel:
    """Return the LoadedModel of these parts, with its sizes, context length and dtype."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from cortexmlx.models import weights

    context, context_notes = context_length_or_default(config)
    notes += context_notes
    floats = [a for _, a in tree_flatten(model.parameters()) if mx.issubdtype(a.dtype, mx.floating)]
    # Norms have the type of the activations. The scales of packed weights may be finer.
    norms = [a for a in floats if a.ndim == 1]
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        name=name,
        path=path,
        context_length=context,
        weight_bytes=weights.weight_bytes(model),
        parameters=weights.parameter_count(model),
        dtype=dtype_name((norms or floats)[0].dtype),
        notes=notes,
        adapter=adapter,
    )
